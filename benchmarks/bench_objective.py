"""How many trials a minute a function of one's own gets that does nothing: what dryfit itself takes.

python benchmarks/bench_objective.py [--trials 300]
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import dryfit
import study_runs


def nothing(trial: dryfit.Trial) -> float:
    return trial.params["x"] ** 2


def reports(trial: dryfit.Trial) -> float:
    for step in range(10):
        trial.report(trial.params["x"], step)
    return trial.params["x"] ** 2


def measure(objective, trials: int, sampler: str, parallel: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "study"
        began_s = time.perf_counter()
        dryfit.tune(
            objective=objective,
            space={"x": {"low": -1.0, "high": 1.0}},
            trials=trials,
            folder=folder,
            search={"sampler": sampler},
            runtime={"parallel": parallel},
        )
        wall_s = time.perf_counter() - began_s
        state = study_runs.fold(folder)
    starts = [attempt.placed_at_s for trial in state.trials for attempt in trial.attempts]
    first_lines = [attempt.overhead_ms for trial in state.trials for attempt in trial.attempts if attempt.overhead_ms]
    per_minute = 60 * (len(starts) - 1) / (max(starts) - min(starts))
    print(
        f"{objective.__name__}, {sampler}, parallel = {parallel}: {per_minute:.0f} trials a minute, "
        f"first line after {statistics.median(first_lines):.1f} ms (median), {wall_s:.1f} s for {trials} in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=300)
    options = parser.parse_args()
    for objective in (nothing, reports):
        for sampler in ("random", "tpe"):
            measure(objective, options.trials, sampler, 1)
    measure(nothing, options.trials, "random", 2)


if __name__ == "__main__":
    main()
