"""A whole search against its alternatives: time, score, CPU time and memory of the same trials' worth of work.

    python benchmarks/bench_alternatives.py [--trials 6] [--seeds 1] [--rows 320] [--arms a,c,d] [--out FOLDER]
    python benchmarks/bench_alternatives.py table --out FOLDER

a: Optuna's TPE and median pruner around the HF Trainer, in one process (plain_optuna.py). b: Ray Tune with ASHA
around the same Trainer (plain_ray.py), in an environment that is made for it. c: dryfit with the file of ``dryfit
init``. d: the same with ``runtime.parallel = 1`` and fp32. All read the same rows of contracts (``--contracts
FOLDER`` or DRYFIT_CONTRACTS; the starter's posts without) and search the same keys: those of the starter file that
the Trainer has too. Epochs, lengths and the pruner's settings are that file's for all. Each finished search is a file
in ``--out``, and is not run again: the arms take turns, and a second call goes on. What dryfit measures for "auto" it
measures anew in each search.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alternatives_table import ARMS, Result, table
from measured import contract_files
from process_tree import TreeCost, run_tree

import dryfit
from dryfit.ledger.events import ReportMade
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import each_event
from dryfit.meta.checkpoint_files import model_folder
from dryfit.settings.study_file import SearchSettings
from dryfit.settings.tables import ModelSettings
from dryfit.study.template import init_folder

HERE = Path(__file__).parent
SHARED_KEYS = ("optim.lr", "optim.weight_decay", "train.batch_size", "sched.name", "head.dropout")
RAY_PACKAGES = ("ray[tune]", "transformers", "accelerate", "scikit-learn")
# Each arm decides itself how many threads it takes.
NOT_PASSED = re.compile(r"(OMP|MKL|OPENBLAS|RAY|DRYFIT)_.*|PYTHONPATH|TOKENIZERS_PARALLELISM")

Validations = list[tuple[float, float]]


@dataclass(frozen=True)
class Work:
    """What each arm is given; searches of different work do not compare."""

    trials: int
    rows: int
    validation_rows: int
    model: str
    train: str
    validation: str
    test: str


def arm_env(folder: Path) -> dict[str, str]:
    """Return the environment of an arm: no threads chosen, nothing from the net, and a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not NOT_PASSED.fullmatch(name)}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "DRYFIT_CACHE": str(folder / "cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    }


def starter_text(folder: Path) -> str:
    """Return the study file of ``dryfit init``, with the keys alone that the Trainer has too."""
    init_folder(folder)
    lines = (folder / "study.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    begin = lines.index("[space]\n") + 1
    end = next(at for at in range(begin, len(lines)) if not lines[at].startswith('"'))
    space = [line for line in lines[begin:end] if line.split('"')[1] in SHARED_KEYS]
    text = "".join([*lines[:begin], *space, *lines[end:]])
    assert set(tomllib.loads(text)["space"]) == set(SHARED_KEYS)
    return text


def tune(text: str, work: Work, seed: int, folder: Path, keys: dict[str, Any]) -> tuple[TreeCost, Validations]:
    """Search with dryfit."""
    study = folder / "study"
    study.mkdir()
    (study / "study.toml").write_text(text, encoding="utf-8")
    keys = {
        "study.trials": work.trials,
        "study.seed": seed,
        "data.train": work.train,
        "data.validation": work.validation,
        "data.test": work.test,
        "data.train_limit": work.rows,
        "data.validation_limit": work.validation_rows,
        "model.name": work.model,
        **keys,
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "dryfit.documents.command_line", "tune", str(study), "--quiet", "--json", *sets]
    path = {"PYTHONPATH": str(Path(dryfit.__file__).parents[1])}
    cost = run_tree(command, folder / "log", arm_env(folder) | path)
    events = each_event(StudyLayout(study).ledger)
    return cost, [(event.at, event.point.value) for event in events if isinstance(event, ReportMade)]


def search_of(text: str, work: Work, seed: int, out: Path) -> dict[str, Any]:
    """Return the study file's search as plain_trials.Search has it."""
    file = tomllib.loads(text)
    search = SearchSettings.model_validate_json(json.dumps(file["search"]))
    return {
        **{name: getattr(work, name) for name in ("trials", "rows", "validation_rows", "train", "validation")},
        **{name: file["train"][name] for name in ("max_length", "epochs", "evals_per_epoch")},
        **{name: getattr(search, name) for name in ("startup_trials", "pruner_startup_trials", "warmup_reports")},
        "warmup_ratio": file["sched"]["warmup_ratio"],
        "space": file["space"],
        "model": str(model_folder(ModelSettings(name=work.model))),
        "seed": seed,
        "out": str(out),
    }


def plain(python: str, script: str, text: str, work: Work, seed: int, folder: Path) -> tuple[TreeCost, Validations]:
    """Search with one of the loops around the Trainer."""
    file = folder / "search.json"
    file.write_text(json.dumps(search_of(text, work, seed, folder)), encoding="utf-8")
    cost = run_tree([python, str(HERE / script), str(file)], folder / "log", arm_env(folder))
    lines = (folder / "validations.jsonl").read_text(encoding="utf-8").splitlines()
    return cost, [(one["at_s"], one["value"]) for one in map(json.loads, lines)]


def ray_python(folder: Path) -> str:
    """Return the interpreter of the environment with Ray, made if it is not there.

    torch goes first and by its pin alone, as in the Makefile: pip takes the CPU build where the index has one.
    """
    python, made = folder / "bin" / "python", folder / "complete"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(HERE.parent / "constraints.txt")]
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, *RAY_PACKAGES], check=True)
        made.touch()
    return str(python)


def run_arm(arm: str, seed: int, work: Work, folder: Path, ray_env: Path) -> Result:
    """Run one search in an empty folder."""
    with tempfile.TemporaryDirectory() as temporary:
        text = starter_text(Path(temporary))
    match arm:
        case "a":
            cost, seen = plain(sys.executable, "plain_optuna.py", text, work, seed, folder)
        case "b":
            cost, seen = plain(ray_python(ray_env), "plain_ray.py", text, work, seed, folder)
        case "c":
            cost, seen = tune(text, work, seed, folder, {})
        case _:
            cost, seen = tune(text, work, seed, folder, {"runtime.parallel": 1, "train.precision": "fp32"})
    validations = [(at_s - cost.began_at_s, value) for at_s, value in seen]
    return Result(arm, seed, asdict(work), *asdict(cost).values(), validations=validations)


def turns(arms: Sequence[str], seeds: int) -> Iterator[tuple[str, int]]:
    """Return the arms of each seed in turn, each time another one first."""
    for seed in range(1, seeds + 1):
        first = (seed - 1) % len(arms)
        yield from ((arm, seed) for arm in (*arms[first:], *arms[:first]))


def run_all(
    out: Path, arms: Sequence[str], seeds: int, work: Work, run: Callable[[str, int, Path], Result]
) -> list[Result]:
    """Run what has no file in the folder yet.

    Args:
        out: The folder of results.
        arms: Which to run.
        seeds: How many seeds, from 1.
        work: What is searched.
        run: Runs an arm with a seed in a folder.

    Raises:
        SystemExit: The folder has results of other work.
    """
    found: list[Result] = []
    for arm, seed in turns(arms, seeds):
        file = out / f"{arm}-{seed}.json"
        if file.exists():
            result = Result.read(file)
            if result.work != asdict(work):
                raise SystemExit(f"{file} is of other work: {result.work}, not {asdict(work)}; take another --out")
        else:
            with tempfile.TemporaryDirectory(dir=out, prefix=f"{arm}-{seed}-") as folder:
                result = run(arm, seed, Path(folder))
            result.write(file)
        print(f"{arm} {seed}: {result}", flush=True)
        found.append(result)
    return found


def rows_of(contracts: str | None, posts: Path) -> dict[str, str]:
    """Return the file of each split: contracts, or else the posts of the starter, written into a folder."""
    if (files := contract_files(contracts)) is None:
        print("the starter's posts instead")
        if not posts.exists():
            init_folder(posts)
        files = {split: str(posts / "data" / f"{split}.jsonl") for split in ("train", "validation", "test")}
    return {split: str(Path(file).resolve()) for split, file in files.items()}


def main(words: Sequence[str] | None = None) -> None:
    """Run, or print the table of what was run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("--out", type=Path, help="folder of the results, which stays; a temporary one if absent")
    parser.add_argument("--arms", default="a,c,d", help="of a, b, c, d")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=320, help="training rows")
    parser.add_argument("--validation-rows", type=int, default=240)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--contracts", default=os.environ.get("DRYFIT_CONTRACTS"))
    parser.add_argument("--ray-env", type=Path, help="environment of arm b; OUT/ray-env if absent")
    options = parser.parse_args(words)
    arms = options.arms.split(",")
    if not set(arms) <= set(ARMS):
        parser.error(f"--arms {options.arms}: any of {', '.join(ARMS)}")
    with tempfile.TemporaryDirectory() as temporary:
        out: Path = (options.out or Path(temporary)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        if options.action == "table":
            print(table([Result.read(file) for file in sorted(out.glob("[abcd]-*.json"))]))
            return
        files = rows_of(options.contracts, out / "posts")
        work = Work(
            options.trials,
            options.rows,
            options.validation_rows,
            options.model,
            files["train"],
            files["validation"],
            files["test"],
        )
        ray_env = (options.ray_env or out / "ray-env").resolve()
        print(
            table(
                run_all(
                    out, arms, options.seeds, work, lambda arm, seed, folder: run_arm(arm, seed, work, folder, ray_env)
                )
            )
        )


if __name__ == "__main__":
    main()
