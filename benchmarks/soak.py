"""The soak: thousands of tiny trials through real children in one run, and whether anything grows with them.

    python benchmarks/soak.py [--trials 5000] [--every 50] [--folder DIR]

The study runs in a process of its own (`dryfit.tune` on a function, TPE, median pruner, two trials side by side, the
Optuna mirror on); this one looks at it: memory, descriptors and threads of the control process, the fork server and
the mirror, how many processes there are, what the logs take. Each look is a row of samples.csv, written at once, so a
soak that is interrupted leaves its table; called again on the same folder, it goes on and says so. From trial 500 on
everything must be flat: the growth fitted over the rest may not pass the bounds below. What the control process and the
mirror remember of each trial is in their bounds, and nothing else is.

Exit status 0: flat, and the ledger has every trial; 1: something grows, or trials are missing.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import psutil
import soak_trial

import dryfit
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.text import LineTail
from dryfit.settings.trial import Outcome
from dryfit.study.session import read_study

SETTLED = 500
PARALLEL = 2
_POLL_S = 0.05
_FINISHED = b'"type":"trial_finished"'


@dataclass(frozen=True)
class Sample:
    """One look. Memory is resident, in MiB."""

    trials: int
    seconds: float
    control_mib: float
    control_fds: int
    control_threads: int
    server_mib: float
    server_fds: int
    server_threads: int
    mirror_mib: float
    mirror_fds: int
    mirror_threads: int
    processes: int
    zombies: int
    logs_mib: float
    entries: int


@dataclass(frozen=True)
class Bound:
    """How much a column may grow.

    Attributes:
        per_1000: With 1 000 trials.
        slack: However few they are: what one look may differ from another.
    """

    per_1000: float
    slack: float


BOUNDS: Mapping[str, Bound] = {
    "control_mib": Bound(6.0, 4.0),
    "control_fds": Bound(0.5, 2.0),
    "control_threads": Bound(0.5, 1.0),
    "server_mib": Bound(0.5, 1.0),
    "server_fds": Bound(0.5, 2.0),
    "server_threads": Bound(0.5, 1.0),
    "mirror_mib": Bound(12.0, 6.0),
    "mirror_fds": Bound(0.5, 2.0),
    "mirror_threads": Bound(0.5, 1.0),
    "processes": Bound(1.0, 3.0),
    "zombies": Bound(0.5, 2.0),
    "logs_mib": Bound(0.1, 0.1),
    "entries": Bound(0.5, 2.0),
}


def growth(samples: Sequence[Sample], column: str) -> float:
    """What a column grew by from the first sample to the last, as a straight line through all of them has it."""
    trials = np.array([sample.trials for sample in samples], dtype=float)
    values = np.array([getattr(sample, column) for sample in samples], dtype=float)
    slope = np.polyfit(trials, values, 1)[0]
    return float(slope * (trials[-1] - trials[0]))


def verdicts(samples: Sequence[Sample], settled: int = SETTLED) -> list[tuple[str, float, float, bool]]:
    """Of each column: its growth, growth a 1 000 trials, and whether it keeps to its bound; from ``settled`` on."""
    rest = [sample for sample in samples if sample.trials >= settled]
    if len({sample.trials for sample in rest}) < 3:
        raise SystemExit(f"{len(rest)} samples from trial {settled} on: too few to say anything")
    thousands = (rest[-1].trials - rest[0].trials) / 1000
    found = []
    for column, bound in BOUNDS.items():
        grown = growth(rest, column)
        found.append((column, grown, grown / thousands, grown <= max(bound.slack, bound.per_1000 * thousands)))
    return found


def look(control: psutil.Process, folder: Path, trials: int, seconds: float) -> Sample | None:
    """Look at everything once; None where a process came or went meanwhile."""
    try:
        every = control.children(recursive=True)
        named = {one.pid: " ".join(one.cmdline()) for one in control.children()}
        server = next(one for one in control.children() if "dryfit.processes.fork_server" in named[one.pid])
        mirror = next(one for one in control.children() if "dryfit.search.follower_process" in named[one.pid])
        found: dict[str, float] = {}
        for name, process in (("control", control), ("server", server), ("mirror", mirror)):
            found[f"{name}_mib"] = process.memory_info().rss / 2**20
            found[f"{name}_fds"] = process.num_fds()
            found[f"{name}_threads"] = process.num_threads()
    except (psutil.Error, StopIteration, KeyError):
        return None
    zombies = 0
    for one in every:
        with suppress(psutil.Error):
            zombies += one.status() == psutil.STATUS_ZOMBIE
    logs = sum(file.stat().st_size for file in (folder / "logs").iterdir()) / 2**20
    entries = len(os.listdir(folder)) + len(os.listdir(folder / "logs"))
    found |= {"processes": len(every), "zombies": zombies, "logs_mib": logs, "entries": entries}
    return Sample(trials=trials, seconds=seconds, **found)  # type: ignore[arg-type]


def read_samples(file: Path) -> list[Sample]:
    """The rows so far; a torn last one is left out."""
    if not file.exists():
        return []
    kinds = {one.name: float if one.type is float else int for one in fields(Sample)}
    with file.open(newline="") as rows:
        return [
            Sample(**{name: kinds[name](text) for name, text in row.items()})
            for row in csv.DictReader(rows)
            if None not in row.values() and row[fields(Sample)[-1].name]
        ]


def write_sample(file: Path, sample: Sample) -> None:
    """Add a row, and its head before the first."""
    new = not file.exists()
    with file.open("a", newline="") as rows:
        writer = csv.DictWriter(rows, [one.name for one in fields(Sample)])
        if new:
            writer.writeheader()
        writer.writerow({name: round(value, 3) for name, value in asdict(sample).items()})


def control(folder: Path, trials: int) -> None:
    """The control process: one run from the first trial to the last."""
    done = dryfit.tune(
        objective=soak_trial.tiny,
        space=soak_trial.SPACE,
        trials=trials,
        folder=folder,
        search={"sampler": "tpe", "pruner": "median"},
        runtime={"parallel": PARALLEL},
    )
    sys.exit(done.status)


def watch(process: subprocess.Popen[bytes], folder: Path, samples: Path, every: int) -> None:
    """Look at the study each time so many trials more have ended, until it is over."""
    layout, began_s = StudyLayout(folder), time.monotonic()
    tail, ended, due = LineTail(layout.ledger), 0, 0
    known = psutil.Process(process.pid)
    while process.poll() is None:
        ended += sum(_FINISHED in line for line in tail.read())
        if ended >= due:
            sample = look(known, folder, ended, time.monotonic() - began_s)
            if sample is not None:
                write_sample(samples, sample)
                due = ended - ended % every + every
                if ended % (10 * every) < every:
                    print(f"{ended} trials, {sample.seconds:.0f} s: {_short(sample)}", flush=True)
        time.sleep(_POLL_S)


def _short(sample: Sample) -> str:
    return (
        f"control {sample.control_mib:.1f} MiB, {sample.control_fds} descriptors; server {sample.server_mib:.1f} MiB, "
        f"{sample.server_fds}; mirror {sample.mirror_mib:.1f} MiB; {sample.processes} processes"
    )


def check(folder: Path, samples: Sequence[Sample], trials: int, settled: int) -> bool:
    """Print what grew and what became of the trials; whether all is as it must be."""
    flat = True
    print(f"\nfrom trial {settled} on   growth   a 1 000 trials   bound a 1 000")
    for column, grown, each, keeps in verdicts(samples, settled):
        print(f"{column:20s} {grown:8.2f}   {each:14.2f}   {BOUNDS[column].per_1000:13g}   {'' if keeps else 'GROWS'}")
        flat = flat and keeps
    state = read_study(StudyLayout(folder))
    counts = Counter(str(trial.outcome) for trial in state.trials)
    attempts = sum(len(trial.attempts) for trial in state.trials)
    print(f"{len(state.trials)} trials in {attempts} attempts and {len(state.sessions)} session(s): {dict(counts)}")
    raised = sum(
        trial.outcome is Outcome.FAILED and trial.number % soak_trial.RAISES_EVERY != 11 for trial in state.trials
    )
    whole = state.counted == trials == len(state.trials) and not state.open_trials and not raised
    print("flat" if flat else "something grows", "and every trial has its end" if whole else "and trials are MISSING")
    return flat and whole


def main() -> None:
    """Run the soak, or go on with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--every", type=int, default=50, help="trials between two looks")
    parser.add_argument("--settled", type=int, default=SETTLED, help="from which trial on all must be flat")
    parser.add_argument("--folder", type=Path, help="stays afterwards; a temporary one if absent")
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.control:
        control(options.folder, options.trials)
    with tempfile.TemporaryDirectory() as temporary:
        base = options.folder or Path(temporary)
        base.mkdir(parents=True, exist_ok=True)
        folder, file = (base / "study").resolve(), base / "samples.csv"
        before = read_samples(file)
        if before:
            print(f"going on after trial {before[-1].trials}: not one run any more")
        command = [sys.executable, __file__, "--control", "--folder", str(folder), "--trials", str(options.trials)]
        began_s = time.monotonic()
        with (base / "log.txt").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                watch(process, folder, file, options.every)
            finally:
                process.terminate()
                status = process.wait()
        wall_s, samples = time.monotonic() - began_s, read_samples(file)
        ran = options.trials - (before[-1].trials if before else 0)
        print(f"{wall_s:.0f} s, {1000 * wall_s / max(1, ran):.0f} ms a trial; the study ended with {status}")
        sys.exit(0 if check(folder, samples, options.trials, options.settled) and status == 0 else 1)


if __name__ == "__main__":
    main()
