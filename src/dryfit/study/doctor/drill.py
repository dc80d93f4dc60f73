"""Kills processes of a tiny study on this machine, and compares what it comes to with the same study undisturbed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from dryfit.core.errors import ChildError
from dryfit.core.jobs.train import TinyLmRequest
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.settings.trial import Outcome
from dryfit.core.text.secrets import public_environment
from dryfit.runtime.children.orphans import sweep
from dryfit.runtime.children.processes import carries_marker, lives, marker_of
from dryfit.starter.posts import write_splits
from dryfit.store.events import AttemptEvent, Event, TrialEvent
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import LedgerTail
from dryfit.store.replay import StudyState
from dryfit.study.loop.child_jobs import run_alone

_LOOK_S: Final = 0.005
_MOST_S: Final = 600.0
"""When a run counts as hung: a machine that others use makes everything many times slower."""
_ENDING_S: Final = 10.0
_ROWS: Final = (48, 16, 8)
_STUDY: Final = """\
[study]
name = "drill"
task = "{task}"
trials = 3
seed = 7
baselines_s = 0
[data]
train = "train.jsonl"
validation = "validation.jsonl"
[model]
name = "{model}"
[train]
epochs = 2
batch_size = 8
max_length = 128
evals_per_epoch = 2
[lm]
generate_rows = 1
max_new_tokens = 1
[space]
"optim.lr" = {{low = 1e-4, high = 1e-2, log = true}}
[search]
sampler = "random"
pruner = "none"
mirror = "none"
[execution]
device = "cpu"
threads = 1
[runtime]
checkpoint_every_s = 0.001
"""


class Victim(StrEnum):
    """What is killed."""

    TRIAL = "trial's process"
    STUDY = "study's process"


@dataclass(frozen=True, slots=True)
class KillMoment:
    """When something is killed: at the first event of a kind after the kill before.

    Attributes:
        victim: What is killed.
        event: The kind of event.
        words: The same for a reader.
    """

    victim: Victim
    event: str
    words: str


MOMENTS: Final = (
    KillMoment(Victim.TRIAL, "report", "after a validation"),
    KillMoment(Victim.STUDY, "first_step", "as the trial trains again"),
    KillMoment(Victim.STUDY, "trial_finished", "between two trials"),
    KillMoment(Victim.STUDY, "attempt_placed", "as a trial starts"),
    KillMoment(Victim.TRIAL, "checkpoint", "after a checkpoint"),
)


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill that was done.

    Attributes:
        moment: Which.
        trial: The trial at work; None: none was.
        after_s: Seconds since the drill began.
    """

    moment: KillMoment
    trial: int | None
    after_s: float


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """What a trial came to; all of it must be the same whether anything was killed.

    Attributes:
        lr: Its learning rate, which is searched.
        outcome: How it ended.
        value: Its value.
        reports: Step and value of each validation.
    """

    lr: object
    outcome: Outcome | None
    value: float | None
    reports: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Drill:
    """What a drill has shown.

    Attributes:
        kills: What was killed, in order.
        undisturbed: Each trial of the study that nobody disturbed.
        disturbed: Each trial of the study whose processes were killed.
        left: Processes that were left over, and had to be killed.
        wall_s: How long it took.
    """

    kills: tuple[Kill, ...]
    undisturbed: tuple[TrialEnd, ...]
    disturbed: tuple[TrialEnd, ...]
    left: int
    wall_s: float

    @property
    def troubles(self) -> tuple[str, ...]:
        """What is wrong, in sentences; empty: nothing was lost."""
        found: list[str] = []
        missed = len(MOMENTS) - len(self.kills)
        if missed:
            found.append(f"{missed} of {len(MOMENTS)} kills came too late: the study was done before")
        if len(self.undisturbed) != len(self.disturbed):
            found.append(f"{len(self.disturbed)} trials instead of {len(self.undisturbed)}")
        pairs = zip(self.undisturbed, self.disturbed, strict=False)
        changed = [number for number, (calm, killed) in enumerate(pairs) if calm != killed]
        if changed:
            found.append(f"trial(s) {', '.join(map(str, changed))} came to something else")
        if any(one.outcome is not Outcome.COMPLETE for one in self.undisturbed):
            found.append("a trial did not complete although nobody disturbed it")
        if self.left:
            found.append(f"{self.left} process(es) were left over")
        return tuple(found)


class _Run:
    """A study that is run by a process of its own, followed by its ledger.

    Args:
        folder: Where its study file lies.
        log: Where what the process says is added.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self.layout = StudyLayout(folder.resolve())
        self.state = StudyState()
        self._tail = LedgerTail(self.layout.ledger)
        self._log = log
        self.process = self._start("tune")

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        folder = self.layout.folder
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder.parent)}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dryfit.cli.app", command, str(folder), "--quiet"],
                cwd=folder,
                env={**public_environment(os.environ), **offline},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look(self) -> list[Event]:
        """Return the events since the last call."""
        events = self._tail.read()
        for event in events:
            self.state.apply(event)
        return events

    def kill(self, victim: Victim, event: Event) -> bool:
        """Kill a process; False where it has ended before."""
        if victim is Victim.STUDY:
            if self.process.poll() is not None:
                return False
            self.process.kill()
            self.process.wait()
            self.process = self._start("resume")
            return True
        assert isinstance(event, AttemptEvent)
        attempt = self.state.trials[event.number].attempts[-1]
        if attempt.pid is None or attempt.ended or not carries_marker(attempt.pid, self.marker):
            return False
        with suppress(ProcessLookupError):
            os.kill(attempt.pid, signal.SIGKILL)
            return True
        return False

    @property
    def marker(self) -> str:
        """What the study's processes carry; empty before it has begun."""
        created = self.state.created
        return marker_of(created.id, self.layout.folder) if created is not None else ""

    def ends(self) -> tuple[TrialEnd, ...]:
        """Return what its trials have come to."""
        return tuple(
            TrialEnd(
                lr=trial.params.get("optim.lr"),
                outcome=trial.outcome,
                value=trial.value,
                reports=tuple((point.step, point.value) for point in trial.reports),
            )
            for trial in self.state.trials
        )

    def close(self) -> int:
        """End what still runs, and return how many processes were left although the study had ended."""
        running = self.process.poll() is None
        if running:
            self.process.kill()
            self.process.wait()
        if not self.marker:
            return 0
        pids = [attempt.pid for trial in self.state.trials for attempt in trial.attempts if attempt.pid is not None]
        ends_s = time.monotonic() + _ENDING_S
        while any(lives(pid) and carries_marker(pid, self.marker) for pid in pids) and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)  # the kernel ends the children of a process that was killed
        left = sweep(self.marker)
        return 0 if running else len(left)


def run_drill(on_note: Callable[[str], None], on_kill: Callable[[Kill], None]) -> Drill:
    """Run a tiny study twice side by side, once with kills, in a temporary folder that is removed.

    Args:
        on_note: Called with a line on what is being done.
        on_kill: Called with each kill as it is done.

    Raises:
        ChildError: The study could not run at all; with the end of what it said.
    """
    began_s = time.monotonic()
    with _temporary() as folder:
        on_note("writing a tiny model and its rows")
        studies = _written(folder)
        on_note("running the study twice side by side, one of them with kills")
        runs: list[_Run] = []
        try:
            runs = [_Run(study, folder / "log.txt") for study in studies]
            kills = _killed(runs, began_s, on_kill, folder / "log.txt")
        finally:
            left = sum(run.close() for run in runs)
        calm, disturbed = runs
        return Drill(kills, calm.ends(), disturbed.ends(), left, time.monotonic() - began_s)


@contextmanager
def _temporary() -> Generator[Path, None, None]:
    folder = Path(tempfile.mkdtemp(prefix="dryfit-drill-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _written(folder: Path) -> list[Path]:
    """Write the model, and two folders with the same study."""
    write_splits(folder, _ROWS, seed=7)
    model = folder / "model"
    source = str(folder / "train.jsonl")
    run_alone(f"writing {model}", TinyLmRequest(folder=str(model), source=source, seed=7))
    task = next(task for task in BuiltInTask if facts_of(task).decoder)
    studies = [folder / "undisturbed", folder / "disturbed"]
    for study in studies:
        study.mkdir()
        write_splits(study, _ROWS, seed=7)
        (study / "study.toml").write_text(_STUDY.format(task=task, model=model), encoding="utf-8")
    return studies


def _killed(runs: Sequence[_Run], began_s: float, on_kill: Callable[[Kill], None], log: Path) -> tuple[Kill, ...]:
    """Run both studies to their ends, and kill processes of the second at each moment."""
    calm, disturbed = runs
    kills: list[Kill] = []
    while True:
        over = [run.process.poll() is not None for run in runs]
        calm.look()
        for event in disturbed.look():
            moment = MOMENTS[len(kills)] if len(kills) < len(MOMENTS) else None
            if moment is not None and event.type == moment.event and disturbed.kill(moment.victim, event):
                number = event.number if isinstance(event, TrialEvent) else None
                kills.append(Kill(moment, number, time.monotonic() - began_s))
                on_kill(kills[-1])
                break  # what else was read is older than this kill
        else:
            if all(over):
                break
        if time.monotonic() - began_s > _MOST_S:
            raise ChildError("the drill", f"it has not ended in {_MOST_S:.0f} s: {_last(log)}")
        time.sleep(_LOOK_S)
    failed = [run.process.returncode for run in runs if run.process.returncode != 0]
    if failed:
        raise ChildError("the drill", f"a study ended with exit status {failed[0]}: {_last(log)}")
    return tuple(kills)


def _last(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:].strip() or "it said nothing"
