"""How long it takes from the command to the first optimizer step, and where that time goes.

    python benchmarks/bench_first_step.py [--rounds 3] [--tasks criteria causal-lm]

``dryfit init`` and ``dryfit tune``, as a user calls them, killed once the first trial has made its first step. Each
round has a folder of its own: first with an empty cache (``DRYFIT_CACHE``), so what "auto" stands for is measured, then
with that round's cache. Bytecode is written and read, as with an installed package; a round before the first that
counts writes it. Printed are medians, in seconds since the command was given.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import dryfit
from dryfit.ledger.events import AttemptPlaced, Event, FirstStepDone, SessionOpened
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import each_event
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.files import read_model
from dryfit.settings.jobs import ChildRequest
from dryfit.settings.wire import REQUEST_FILE, RESULT_FILE, Job

DRYFIT = [sys.executable, "-m", "dryfit.documents.command_line"]
MARKS = ("opened", "data read", "baselines", "measured", "first trial placed", "first step")
LONGEST_S = 300.0
POLL_S = 0.02


def events_of(layout: StudyLayout) -> list[Event]:
    """Return what the ledger has by now."""
    return list(each_event(layout.ledger)) if layout.ledger.exists() else []


def environment(cache: Path) -> dict[str, str]:
    """Return the command's environment: this tree, a cache of its own, and bytecode."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    tree = {"PYTHONPATH": str(Path(dryfit.__file__).parents[1])}
    return kept | tree | {"DRYFIT_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def answered_at(layout: StudyLayout) -> dict[Job, float]:
    """Return when each job that prepares a study was answered last, in Unix seconds."""
    found: dict[Job, float] = {}
    for result in layout.preparations.rglob(RESULT_FILE):
        request = read_model(result.with_name(REQUEST_FILE), ChildRequest)
        if request is not None:
            job = Job(request.body.job)
            found[job] = max(found.get(job, 0.0), result.stat().st_mtime)
    return found


def first_step(folder: Path, task: BuiltInTask, cache: Path) -> dict[str, float]:
    """Return the seconds from the command to each mark that the run comes by.

    Raises:
        RuntimeError: It did not come to a first step.
    """
    subprocess.run(
        [*DRYFIT, "init", str(folder), "--task", task], env=environment(cache), check=True, capture_output=True
    )
    layout = StudyLayout(folder)
    began_s, log = time.time(), folder / "bench.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*DRYFIT, "tune", str(folder), "--quiet"],
            env=environment(cache),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            while not any(isinstance(event, FirstStepDone) for event in events_of(layout)):
                if process.poll() is not None or time.time() - began_s > LONGEST_S:
                    raise RuntimeError(f"no first step: {log.read_text(errors='replace')[-1000:]}")
                time.sleep(POLL_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its fork server and children end with it
            process.wait()
    return {name: at_s - began_s for name, at_s in marks_of(layout).items()}


def marks_of(layout: StudyLayout) -> dict[str, float]:
    """Return when each mark was passed, in Unix seconds."""
    jobs = {Job.RESOLVE: "data read", Job.BASELINES: "baselines", Job.PACE: "measured"}
    found = {jobs[job]: at_s for job, at_s in answered_at(layout).items() if job in jobs}
    placed_s = 0.0
    for event in events_of(layout):
        match event:
            case SessionOpened(at=at_s):
                found["opened"] = at_s
            case AttemptPlaced(at=at_s) if "first trial placed" not in found:
                found["first trial placed"] = placed_s = at_s
            case FirstStepDone(after_ms=after_ms) if "first step" not in found:
                found["first step"] = placed_s + after_ms / 1000
            case _:
                pass
    return found


def row(task: str, cache: str, found: Sequence[Mapping[str, float]]) -> str:
    """Return a line of the table: medians, and for the last mark the extremes."""
    cells: list[str] = []
    for mark in MARKS:
        values = [one[mark] for one in found if mark in one]
        cells.append(f"{statistics.median(values):.1f}" if values else "")
    last = [one["first step"] for one in found]
    return f"| {task} | {cache} | {' | '.join(cells)} | {min(last):.1f} to {max(last):.1f} |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["criteria", "causal-lm"])
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} over the last minute, {os.cpu_count()} cores")
    print(f"| task | cache | {' | '.join(MARKS)} | least to most |")
    print("|---|---|" + "--:|" * (len(MARKS) + 1))
    for task in map(BuiltInTask, options.tasks):
        fresh: list[dict[str, float]] = []
        again: list[dict[str, float]] = []
        for index in range(options.rounds + 1):
            with tempfile.TemporaryDirectory() as temporary:
                folder, cache = Path(temporary), Path(temporary) / "cache"
                once, twice = (first_step(folder / name, task, cache) for name in ("once", "twice"))
                if index:  # the round before wrote the bytecode
                    fresh.append(once)
                    again.append(twice)
                shutil.rmtree(folder / "once", ignore_errors=True)
        print(row(task, "empty", fresh), row(task, "kept", again), sep="\n", flush=True)


if __name__ == "__main__":
    main()
