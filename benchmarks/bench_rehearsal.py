"""What rehearsing a training script costs: time, CPU time and host memory, at the full size of the model.

    python benchmarks/bench_rehearsal.py [--rounds 3] [--only NAME]

Each round runs `dryfit rehearse` on every script, one after the other, as a user would, by line and with the worst
batch first. The scripts are those of `tests/programs`: Qwen2.5-7B tuned by TRL's SFTTrainer with adapters of rank 8 on
all linear layers, 2 rows of 512 tokens, bf16, checkpointing; BERT-large tuned by the Trainer of transformers, 16 rows
of 512 tokens. On a machine that does other things, trust the CPU time. Memory is the peak resident size of the process
that runs the script.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measured import spread

PROGRAMS = Path(__file__).parents[1] / "tests" / "programs"
SFT = ("sft_lora.py", "--size", "7b", "--length", "512", "--batch", "2", "--rows", "128")
BERT_LARGE = ("glue_trainer.py", "--width", "1024", "--layers", "24", "--vocabulary", "30522", "--length", "512")
SCRIPTS: dict[str, Sequence[str]] = {
    "Qwen2.5-7B, accumulation 2": (*SFT, "--accumulation", "2"),
    "Qwen2.5-7B, accumulation 16": (*SFT, "--accumulation", "16"),
    "BERT-large": (*BERT_LARGE, "--batch", "16", "--rows", "128"),
    "plain loop, 12 layers": ("plain_loop.py", "--width", "768", "--heads", "12", "--layers", "12", "--length", "128"),
}
DEVICE = "h100-80"
FURTHER = ("a100-80", "l40s", "v100-32", "t4")
"""Devices with other kernels, each with a rehearsal of its own."""
GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """What a command took, the peak that it told, and the seconds of its rehearsals alone."""

    wall_s: float
    cpu_s: float
    host_gib: float
    peak_gib: float
    rehearsals_s: float


def rehearse(script: Sequence[str], folder: Path, *, devices: Sequence[str] = (DEVICE,)) -> Cost:
    """Rehearse a script in a process of its own.

    Raises:
        RuntimeError: It could not run to its end.
    """
    program, *arguments = script
    words = [
        "-m",
        "dryfit.documents.command_line",
        "rehearse",
        "--device",
        ",".join(devices),
        "--json",
        "--quiet",
        str(PROGRAMS / program),
    ]
    answer, log = folder / "answer.json", folder / "log.txt"
    began_s = time.perf_counter()
    with answer.open("wb") as out, log.open("wb") as err:
        written = [] if program == "plain_loop.py" else ["--output_dir", str(folder / "out")]
        command = [sys.executable, *words, *written, *arguments]
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{program} ended with {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
    said = json.loads(answer.read_text(encoding="utf-8"))
    cpu_s = usage.ru_utime + usage.ru_stime
    answers = said.get("devices", [said])
    host_gib, peak_gib = (answers[0][key] / GIB for key in ("host_peak_bytes", "peak_allocated_bytes"))
    return Cost(wall_s, cpu_s, host_gib, peak_gib, sum(one["planner_s"] for one in answers))


def further(names: Sequence[str], rounds: int) -> None:
    """Print what each further device with other kernels costs, and how much of that is not its rehearsal."""
    print("| script | a further device | its rehearsal | besides | CPU of a further device |\n|---|---|---|---|---|")
    for name in names:
        taken: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                one, all_ = (rehearse(SCRIPTS[name], Path(folder), devices=(DEVICE, *more)) for more in ((), FURTHER))
            gains = (all_.wall_s - one.wall_s, all_.rehearsals_s - one.rehearsals_s, all_.cpu_s - one.cpu_s)
            taken.append(tuple(gain / len(FURTHER) for gain in gains))
        wall, own, cpu = (spread([one[at] for one in taken], " s") for at in range(3))
        besides = spread([one[0] - one[1] for one in taken], " s")
        print(f"| {name} | {wall} | {own} | {besides} | {cpu} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SCRIPTS)
    parser.add_argument("--further", action="store_true", help="what each further device costs beside its rehearsal")
    args = parser.parse_args()
    names = [args.only] if args.only else list(SCRIPTS)
    if args.further:
        further(names, args.rounds)
        return
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                costs[name].append(rehearse(SCRIPTS[name], Path(folder)))
    print("| script | time | CPU time | host memory | peak of the device |\n|---|---|---|---|---|")
    for name, taken in costs.items():
        wall, cpu = spread([one.wall_s for one in taken], " s"), spread([one.cpu_s for one in taken], " s")
        host, peak = spread([one.host_gib for one in taken], " GiB"), f"{taken[0].peak_gib:.2f} GiB"
        print(f"| {name} | {wall} | {cpu} | {host} | {peak} |")


if __name__ == "__main__":
    main()
