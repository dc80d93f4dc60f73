"""Rehearse the same programs in environments of several years, and write their peaks into docs/environments.md.

``make environments`` makes the environments one at a time in a temporary folder and removes them: a torch for CUDA is
several gigabytes. `ROWS="2.9 alone"` chooses among them, by a part of the name. Each environment's answers go to
docs/measurements/environments.jsonl; the table has the newest answer of each.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from throwaway import ROOT, CheckError, Environment, make_environment, outside, run, temporary_folder, timed
from versions import FREE_BYTES, find_python

RECORDS: Final = ROOT / "docs" / "measurements" / "environments.jsonl"
PAGE: Final = ROOT / "docs" / "environments.md"
PROGRAMS_FOLDER: Final = ROOT / "tests" / "programs"
START, END = "<!-- table: written by scripts/environments.py -->", "<!-- end of the table -->"
SHOWN: Final = ("torch", "transformers", "accelerate", "peft", "trl", "lightning")
_LIMIT_S: Final = 600


@dataclass(frozen=True, slots=True)
class Program:
    """What is rehearsed.

    Attributes:
        words: The command behind ``dryfit rehearse``.
        needs: Packages without which it does not run.
    """

    title: str
    words: str
    needs: tuple[str, ...] = ()


_LM = "--output_dir out --width 768 --layers 12 --heads 12 --kv_heads 12 --intermediate 3072 --vocabulary 32000"
PROGRAMS: Final = (
    Program(
        "a plain loop, AdamW as it is by default",
        "plain_loop.py --width 768 --layers 12 --heads 12 --vocabulary 32000 --length 512 --batch 8",
    ),
    Program(
        "Trainer, a causal LM in bf16, checkpointed", f"causal_lm_trainer.py {_LM} --length 512", ("transformers",)
    ),
    Program(
        "Trainer with evaluation and metrics",
        "glue_trainer.py --output_dir out --width 768 --layers 12 --vocabulary 30522 --length 128 --batch 16",
        ("transformers", "accelerate"),
    ),
    Program("TRL's SFTTrainer, LoRA in bf16", "sft_lora.py --output_dir out --size 0.5b --length 512", ("trl", "peft")),
    Program(
        "Lightning's Trainer in bf16",
        "lightning_module.py --output_dir out --width 1024 --layers 8 --batch 8 --length 256",
        ("lightning",),
    ),
    Program("FSDP2 over 8 ranks", "torchrun --nproc-per-node 8 data_parallel.py --width 4096 --layers 8 --shard"),
    Program("`torch.compile`, a GPT", "compiled_programs.py gpt"),
)


@dataclass(frozen=True, slots=True)
class Surrounding:
    """An environment to make.

    Attributes:
        python: Its minor version; empty: this interpreter's own environment, made by ``make setup``.
        requirements: What pip installs, the torch first and alone.
    """

    name: str
    python: str
    requirements: tuple[str, ...] = ()


_LIBRARIES = ("datasets", "numpy", "scikit-learn")
SURROUNDINGS: Final = (
    Surrounding(
        "torch 2.8, transformers 4.56",
        "3.10",
        ("torch==2.8.0", "transformers==4.56.2", "accelerate==1.10.1", "peft==0.17.1", "trl==0.23.1", "lightning<2.7"),
    ),
    Surrounding(
        "torch 2.9, transformers 4.57",
        "3.12",
        ("torch==2.9.1", "transformers==4.57.6", "accelerate==1.11.0", "peft==0.18.1", "trl==0.25.1", "lightning<2.7"),
    ),
    Surrounding(
        "torch 2.11, transformers 5.17",
        "3.12",
        ("torch==2.11.0", "transformers==5.17.0", "accelerate", "peft", "trl", "lightning"),
    ),
    Surrounding("dryfit's own", ""),
    Surrounding("the newest of all", "3.13", ("torch", "transformers", "accelerate", "peft", "trl", "lightning")),
    Surrounding("torch alone", "3.13", ("torch==2.13.0",)),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """What the programs said in an environment.

    Attributes:
        peaks: Peak allocated bytes by the program's title; of compiled code the upper bound. Absent: not run.
        why: Why a program has none.
    """

    name: str
    python: str
    built_for: str
    versions: dict[str, str]
    peaks: dict[str, int] = field(default_factory=dict[str, int])
    why: dict[str, str] = field(default_factory=dict[str, str])


def rehearse(program: Program, python: Path, folder: Path) -> dict[str, Any]:
    """Return the answer of one rehearsal, by the environment's interpreter."""
    folder.mkdir()
    words = program.words.split()
    where = next(at for at, word in enumerate(words) if word.endswith(".py"))
    words[where] = str(PROGRAMS_FOLDER / words[where])
    command = [Path(sys.executable).with_name("dryfit"), "rehearse", "--json", "--python", python, "--device", "80GiB"]
    command += ["--with", "triton"]  # which each torch for CUDA brings
    surroundings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [*map(str, command), *words],
            cwd=folder,
            env=outside(surroundings),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"reasons": [f"not within {_LIMIT_S} s"]}
    if not done.stdout.startswith("{"):
        return {"reasons": [(done.stderr.strip().splitlines() or ["no answer"])[-1]]}
    return json.loads(done.stdout)


def answered(surrounding: Surrounding, environment: Environment, folder: Path) -> Answered:
    """Rehearse every program whose packages are there."""
    found = dict(zip(SHOWN, environment.versions(*SHOWN), strict=True))
    code = "import sys, torch; print('%d.%d.%d' % sys.version_info[:3], torch.version.cuda or 'the CPU')"
    python, built_for = run([environment.python, "-c", code], cwd=folder).stdout.strip().split(" ", 1)
    made = Answered(surrounding.name, python, built_for, {name: one for name, one in found.items() if one})
    for number, program in enumerate(PROGRAMS):
        if any(name not in made.versions for name in program.needs):
            continue
        with timed(program.title):
            answer = rehearse(program, environment.python, folder / f"run-{number}")
        peak = answer.get("peak_allocated_bytes")
        if answer.get("verdict") in ("fits", "refused") and peak:
            made.peaks[program.title] = peak
        else:
            lines = str(answer.get("traceback") or "").strip().splitlines() or answer.get("reasons") or ["no answer"]
            made.why[program.title] = lines[-1].strip()[:200]
            print(f"   {made.why[program.title]}", file=sys.stderr)
    return made


def ask(surrounding: Surrounding) -> Answered | str:
    """Make an environment, rehearse in it and remove it; return why it cannot be made where it cannot."""
    with temporary_folder("environments") as folder:
        if not surrounding.python:
            return answered(surrounding, Environment(Path(sys.prefix)), folder)
        python = find_python(surrounding.python, Path.home())
        if python is None:
            return f"no python{surrounding.python} on PATH, by uv or in ~/.pyenv that can make environments"
        if (free := shutil.disk_usage(tempfile.gettempdir()).free) < FREE_BYTES:
            return f"{free / 1e9:.0f} GB are free, of the {FREE_BYTES / 1e9:.0f} it may take"
        environment = make_environment(folder / "environment", python)
        torch, *others = surrounding.requirements
        try:
            with timed(f"installing {' '.join(surrounding.requirements)}"):
                environment.install(torch)
                pin = f"torch=={environment.versions('torch')[0].partition('+')[0]}"
                if others:
                    environment.install(pin, *others, *_LIBRARIES)
        except CheckError as error:
            return f"it cannot be installed: {str(error).strip().splitlines()[-1]}"
        return answered(surrounding, environment, folder)


def read(path: Path) -> dict[str, Answered]:
    """Return the newest answers of each environment, by name."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {record["name"]: Answered(**record) for record in map(json.loads, lines)}


def apart(peaks: Sequence[int]) -> str:
    """Return how far peaks lie apart, as a share of the smallest."""
    share = max(peaks) / min(peaks) - 1
    return "0" if not share else f"{share:.1%}" if share >= 0.001 else f"{share:.4%}"


def tables(known: Mapping[str, Answered]) -> str:
    """Return the tables of peaks and of versions."""
    columns = [known[one.name] for one in SURROUNDINGS if one.name in known]
    lines = [
        f"| program, peak MiB | {' | '.join(one.name for one in columns)} | most apart |",
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    for program in PROGRAMS:
        peaks = [one.peaks.get(program.title) for one in columns]
        cells = ["-" if peak is None else f"{peak / 2**20:,.1f}" for peak in peaks]
        seen = [peak for peak in peaks if peak is not None]
        lines.append(f"| {program.title} | {' | '.join(cells)} | {apart(seen) if len(seen) > 1 else '-'} |")
    lines += ["", f"| environment | Python | built for | {' | '.join(SHOWN)} |", f"|---|{'---|' * (len(SHOWN) + 2)}"]
    for one in columns:
        built = one.built_for if one.built_for == "the CPU" else f"CUDA {one.built_for}"
        versions = " | ".join(one.versions.get(name, "-").partition("+")[0] for name in SHOWN)
        lines.append(f"| {one.name} | {one.python} | {built} | {versions} |")
    whys = [f"- {one.name}, {title}: {why}" for one in columns for title, why in one.why.items()]
    return "\n".join([*lines, *([""] if whys else []), *whys])


def written(page: str, text: str) -> str:
    """Return a page with the tables in their place.

    Raises:
        CheckError: The page has no such place.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise CheckError(f"{PAGE}: no place for the tables ({START})")
    return f"{before}{START}\n{text}\n{END}{after}"


def main(words: str) -> int:
    """Ask the environments that were chosen; return 1 where none could be made or a program failed."""
    chosen = [one for one in SURROUNDINGS if not words or any(word in one.name for word in words.split())]
    made: list[Answered] = []
    for surrounding in chosen:
        with timed(surrounding.name):
            found = ask(surrounding)
        if isinstance(found, str):
            print(f"left out: {surrounding.name}: {found}")
            continue
        made.append(found)
        with RECORDS.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(found)) + "\n")
        PAGE.write_text(written(PAGE.read_text("utf-8"), tables(read(RECORDS))), "utf-8")
    print(tables({one.name: one for one in made}))
    return int(not made or any(one.why for one in made))


if __name__ == "__main__":
    sys.exit(main(os.environ.get("ROWS", "")))
