"""The preset `standard` on the contract rows: the search as it comes against random search, the same budget for both.

    python benchmarks/bench_search.py --contracts FOLDER --keep WORK     (or DRYFIT_CONTRACTS=FOLDER)

Each study trains on the first rows of the training contracts and is scored on the first validation rows; its winner
is scored once on all test rows. The 95 % intervals are a bootstrap over contracts (rows of one are not independent).
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_contracts import TestRows, interval, line, predict, print_baselines
from measured import contract_files, run

import dryfit
from dryfit.settings.trial import Outcome

SAMPLERS = ("tpe", "random")


def search(sampler: str, work: Path, data: dict[str, str], options: argparse.Namespace) -> str:
    """Run one study to its end, or go on with it; say what it cost this time."""
    folder, command = work / sampler, [sys.executable, "-m", "dryfit.documents.command_line"]
    if not (folder / "study.toml").exists():
        run([*command, "init", str(folder), "--preset", "standard"], work / "init.log")
    keys = {
        "data.train": data["train"],
        "data.validation": data["validation"],
        "data.test": data["test"],
        "data.train_limit": options.train_rows,
        "data.validation_limit": options.validation_rows,
        "train.max_length": options.max_length,
        "search.sampler": sampler,
        "study.seed": options.seed,
        "runtime.parallel": options.parallel,
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    cost = run([*command, "tune", str(folder), "--trials", str(options.trials), *sets], work / f"{sampler}.log")
    return f"{cost.wall_s / 60:.1f} min wall, {cost.cpu_s / 60:.1f} min CPU"


def best_after(folder: Path, counts: Sequence[int]) -> str:
    """The best value after so many trials."""
    values = [trial.value for trial in dryfit.open_study(folder).trials if trial.outcome is not Outcome.REFUSED]
    best = [max((value for value in values[:count] if value is not None), default=float("nan")) for count in counts]
    return ", ".join(f"{count}: {value:.3f}" for count, value in zip(counts, best, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contracts", default=os.environ.get("DRYFIT_CONTRACTS"))
    parser.add_argument("--keep", help="folder that stays, and where a later run goes on; a temporary one if absent")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--train-rows", type=int, default=800)
    parser.add_argument("--validation-rows", type=int, default=400)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    data = contract_files(options.contracts)
    if data is None:
        return
    print_baselines(data, options.train_rows, options.validation_rows)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.keep or temporary)
        work.mkdir(parents=True, exist_ok=True)
        costs = {sampler: search(sampler, work, data, options) for sampler in SAMPLERS}
        test = TestRows.read(data["test"])
        best = {sampler: dryfit.status(work / sampler).best for sampler in SAMPLERS}
        guesses = [
            predict(work / sampler / "trials" / f"{won.number:04d}" / "best", test.rows, options.max_length)
            for sampler, won in best.items()
            if won is not None
        ]
        resampled = interval(test, guesses)
        for sampler, guess, scores in zip(SAMPLERS, guesses, resampled, strict=True):
            won = best[sampler]
            assert won is not None
            print(line(sampler, won.value, test, guess, scores), f"; {costs[sampler]}")
            print(f"  best after {best_after(work / sampler, (5, 10, 15, 20))}; winner {won.number}: {won.params}")
        low, high = np.percentile(resampled[0] - resampled[1], [2.5, 97.5])
        print(f"difference on test: 95 % interval {low:+.3f} to {high:+.3f}")


if __name__ == "__main__":
    main()
