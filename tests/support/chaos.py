"""Storms: a study is run as a user runs it, and its processes are killed at random until it is done."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dryfit.ledger.events import EVENT, TrialFinished
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.processes.helpers import marker_of
from dryfit.settings.errors import FailureKind
from dryfit.settings.text import LineTail
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import MARKER_VARIABLE
from study_runs import ends, events_of, fold, kill_now, marked_processes, start, summary_of

_LOOK_S = 0.01
_CHILDREN_FIRST = 8
"""Children that a storm kills before it kills a control process, however little time that takes."""
SPARED_AFTER = 2
"""Deaths in a row without a new checkpoint, after which a storm lets a trial reach one: the fourth would end it."""


@dataclass
class Follower:
    """The fold of a ledger that somebody else writes, each event of it read once."""

    folder: Path
    state: StudyState = field(default_factory=StudyState)
    _tail: LineTail | None = None

    def look(self) -> StudyState:
        """The study as it is now."""
        if self._tail is None:
            self._tail = LineTail(self.folder / "ledger.jsonl")
        for line in self._tail.read():
            self.state.apply(EVENT.validate_json(line))
        return self.state


def progressless(trial: TrialState) -> int:
    """How many attempts in a row were killed without a new checkpoint."""
    streak = 0
    for attempt in reversed(trial.attempts):
        if attempt.checkpoint_step is not None:
            break
        streak += attempt.failure is not None and attempt.failure.kind is FailureKind.KILLED
    return streak


def children_of(state: StudyState) -> list[int]:
    """Every child that has said its first line so far, in the order of trials and attempts."""
    return [attempt.pid for trial in state.trials for attempt in trial.attempts if attempt.pid is not None]


def parent_of(pid: int) -> int | None:
    """The fork server that made a child; None where the child is gone."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent.pid if parent is not None and "dryfit.processes.fork_server" in parent.cmdline() else None
    return None


def is_of(pid: int, marker: str) -> bool:
    """Whether a process is one of a study's; ids are given to others, and other people's tests run beside."""
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).environ().get(MARKER_VARIABLE) == marker
    return False


@dataclass
class Storm:
    """Kills processes of one study until it is done.

    Attributes:
        folder: The study's.
        draw: Decides who is killed, and when.
        child_s: Least and most seconds between two kills of children.
        control_s: The same of the control process; the fork server has its own turns, with the same bounds.
        killed: How many of each kind.
    """

    folder: Path
    draw: random.Random
    child_s: tuple[float, float]
    control_s: tuple[float, float]
    killed: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Begin the study, and go on until a control process leaves it in order.

        The time of a control process, and of a fork server, counts from its first child: on a busy machine a storm
        would otherwise let none of them come that far. On a fast one, the study might be over before the first of
        them dies: that one dies after so many children at the latest.
        """
        follower = Follower(self.folder)
        process = start("tune", self.folder, "--quiet")
        children_before = 0
        due: dict[str, float] = {}
        while process.poll() is None:
            time.sleep(_LOOK_S)
            state = follower.look()
            if state.created is None or len(children_of(state)) <= children_before:
                continue
            for victim in ("child", "server", "control"):
                due.setdefault(victim, self._next(victim))
            if self.killed["child"] >= _CHILDREN_FIRST and set(self.killed) == {"child"}:
                due["control"] = 0.0
            victim = min(due, key=lambda name: due[name])
            if time.monotonic() < due[victim] or process.poll() is not None:
                continue
            del due[victim]
            if victim == "control":
                kill_now(process)
                self.killed[victim] += 1
                children_before = len(children_of(follower.look()))
                process, due = start("resume", self.folder, "--quiet"), {}
            else:
                pid = self._child(state)
                pid = parent_of(pid) if victim == "server" and pid is not None else pid
                if pid is not None and is_of(pid, marker_of(state.created.id, self.folder)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        self.killed[victim] += 1
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors

    def _next(self, victim: str) -> float:
        return time.monotonic() + self.draw.uniform(*(self.child_s if victim == "child" else self.control_s))

    def _child(self, state: StudyState) -> int | None:
        """A running child, but of trials that a further death would rightly end."""
        running = [
            trial.attempts[-1].pid
            for trial in state.open_trials
            if trial.attempts
            and not trial.attempts[-1].ended
            and (trial.attempts[-1].checkpoint_step is not None or progressless(trial) < SPARED_AFTER)
        ]
        pids = [pid for pid in running if pid is not None]
        return self.draw.choice(pids) if pids else None


def chosen_seed() -> int:
    """The seed of a storm: ``CHAOS_SEED``, or a new one; it is printed, and pytest shows that where a test fails."""
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))
    print(f"CHAOS_SEED={seed}")
    return seed


def assert_undisturbed(folder: Path, undisturbed: Path, trials: int) -> None:
    """Exactly so many trials, all complete, each once, with the values and reports of a study nobody disturbed."""
    state = fold(folder)
    assert ends(folder) == ends(undisturbed)
    assert [trial.outcome for trial in state.trials] == [Outcome.COMPLETE] * trials
    finished = [event.number for event in events_of(folder) if isinstance(event, TrialFinished)]
    assert sorted(finished) == list(range(trials))
    counts = summary_of(folder)["trials"]
    assert (counts["complete"], counts["failed"], counts["running"]) == (trials, 0, 0)
    assert marked_processes(folder) == []
    assert not list(folder.glob("trials/**/checkpoints")) and not list(folder.glob("trials/*/attempt-*/best"))


def failures(state: StudyState) -> Iterator[tuple[FailureKind, str]]:
    """Kind and action of every failed attempt."""
    for trial in state.trials:
        for attempt in trial.attempts:
            if attempt.failure is not None:
                yield attempt.failure.kind, attempt.failure.action.value


def carriers(variable: str, value: str) -> list[psutil.Process]:
    """Every living process whose environment has this variable with this value, but this one."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            of_it = process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE
            if of_it and process.pid != os.getpid():
                found.append(process)
    return found
