"""What isolation costs: milliseconds to a child's first line and first optimizer step, memory of the control process.

    python benchmarks/bench_overhead.py [--trials 30]

A tiny random BERT, so that what is measured is dryfit and not arithmetic.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import study_runs

DRYFIT = [sys.executable, "-m", "dryfit.documents.command_line"]


def overheads(folder: Path) -> tuple[list[float], list[float]]:
    attempts = [attempt for trial in study_runs.fold(folder).trials for attempt in trial.attempts]
    first_line = [attempt.overhead_ms for attempt in attempts if attempt.overhead_ms is not None]
    first_step = [attempt.first_step_ms for attempt in attempts if attempt.first_step_ms is not None]
    return first_line, first_step


def peak_rss_mb(process: subprocess.Popen) -> float:
    watched = psutil.Process(process.pid)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    return peak / 2**20


def report(name: str, values: list[float]) -> None:
    ranked = sorted(values)
    print(
        f"{name}: median {statistics.median(ranked):.1f} ms, p95 {ranked[round(0.95 * (len(ranked) - 1))]:.1f} ms, "
        f"min {ranked[0]:.1f}, max {ranked[-1]:.1f} ({len(ranked)} children)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--fresh-trials", type=int, default=3)
    options = parser.parse_args()
    helps = []
    for _ in range(11):
        began_s = time.perf_counter()
        subprocess.run([*DRYFIT, "--help"], stdout=subprocess.DEVNULL, check=True)
        helps.append(1000 * (time.perf_counter() - began_s))
    report("dryfit --help", helps[1:])
    with tempfile.TemporaryDirectory() as temporary:
        for isolation, trials in (("forkserver", options.trials), ("fresh", options.fresh_trials)):
            folder = Path(temporary) / isolation
            search = 'sampler = "tpe"'
            study_runs.write_study(folder, trials=trials, search=search, runtime=f'isolation = "{isolation}"')
            process = subprocess.Popen([*DRYFIT, "tune", str(folder), "--quiet", "--json"], stdout=subprocess.DEVNULL)
            peak = peak_rss_mb(process)
            first_line, first_step = overheads(folder)
            report(f"{isolation}: to the first line", first_line)
            report(f"{isolation}: to the first optimizer step", first_step)
            print(f"{isolation}: control process, peak RSS {peak:.0f} MB")


if __name__ == "__main__":
    main()
