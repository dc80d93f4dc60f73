"""Whole sessions whose children do their work in this process, and leave the files that real ones leave.

A session can be killed at any event of the ledger: before it, with half of its line written, and after it. Its children
are then as far as the control process has heard of them, or as far as they can be without its answers.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest

import plan_jobs
from dryfit.ledger.events import Event
from dryfit.ledger.folder import StudyLayout, attempt_key
from dryfit.ledger.ledger import Ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.attempt import clear, read_messages
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildMessage, ChildSpec, SupervisorSettings
from dryfit.processes.node import LocalNode
from dryfit.search.space import Space
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult
from dryfit.settings.plan_messages import PlanRequest, PlanResult
from dryfit.settings.study_file_reading import load_document
from dryfit.settings.training_messages import (
    BaselineScore,
    BaselinesRequest,
    BaselinesResult,
    ResolveRequest,
    StopReason,
    TrainRequest,
    TrainResult,
)
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import (
    BEAT_FILE,
    MESSAGES_FILE,
    RESULT_FILE,
    Checkpointed,
    FirstStep,
    Message,
    Phase,
    Report,
    Started,
    Verdict,
)
from dryfit.study import session
from dryfit.study.driver import StopSignals
from dryfit.study.session import SessionResult, read_study, run_session
from dryfit.tasks.scored_rows import FACTS_FILE, write_facts
from quiet_children import QuietChildren

REPORTS = 3
CRASHES_ONCE, CRASHES_ALWAYS = 2, 3
"""Numbers of the trials that do."""

KNOWN = (
    {"train.batch_size": 8, "train.max_length": 64, "head.hidden": plan_jobs.UNDERESTIMATED, "head.layers": 1},
    {"train.max_length": 4096, "head.layers": 1},
)
"""Trial 0 runs out of memory although its plan fits; trial 1 does not fit."""


class Crashed(BaseException):
    """A child's process dies of a signal."""


class Killed(BaseException):
    """The control process is gone."""


class Way(StrEnum):
    """Where, next to an event of the ledger, the control process is killed."""

    BEFORE = "before"
    MIDWAY = "midway"
    AFTER = "after"


Script = Generator[Message, bool | None, TrainResult]


def train(body: TrainRequest) -> Script:
    """What a trial's process says, and comes to; it goes on from its checkpoint, and is sent verdicts."""
    yield Started(pid=1, overhead_ms=1.0)
    yield Phase(name="train")
    folder = Path(body.checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _crash(body.config.number, Path(body.kept_best_dir).with_name("crashed"))
    if plan_jobs.runs_out(body):
        raise plan_jobs.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    done = max((int(path.name[-1]) for path in Path(body.kept_checkpoint_dir).glob("step-*")), default=0)
    yield FirstStep(after_ms=2.0)
    for n in range(done, REPORTS):
        point = MetricPoint(n=n, step=n + 1, epoch=n + 1.0, value=_value(body, n), metrics={"f1": _value(body, n)})
        if (yield Report(point=point, last=n == REPORTS - 1)) is False:
            return TrainResult(value=None, best=None, steps=n + 1, stopped_by=StopReason.VERDICT)
        (folder / f"step-{n + 1:08d}").mkdir()
        yield Checkpointed(step=n + 1)
    return TrainResult(value=_value(body, REPORTS - 1), best=REPORTS - 1, steps=REPORTS)


def _crash(number: int, flag: Path) -> None:
    if number == CRASHES_ALWAYS:
        raise Crashed
    if number == CRASHES_ONCE and not flag.exists():
        flag.touch()
        raise Crashed


def _value(body: TrainRequest, n: int) -> float:
    settings = body.config.settings
    return (n + 1) / REPORTS / (1 + 100 * settings.optim.lr + abs(settings.train.batch_size - 8))


@dataclass
class FolderChild:
    """One child, as far as it is."""

    spec: ChildSpec
    script: Script | None
    verdict: bool | None = None
    waits: bool = False
    asked_to_stop: bool = False
    ended: ChildExited | None = None

    def go(self) -> list[ChildEvent]:
        """Do the next thing: say one message, or end; what is written is written before it is told."""
        body, folder = self.spec.body, self.spec.folder
        try:
            if self.script is None:
                return [self._end(_answer(body))]
            if self.asked_to_stop:
                return [
                    self._end(ChildResult(TrainResult(value=None, best=None, steps=0, stopped_by=StopReason.REQUEST)))
                ]
            verdict, self.verdict = self.verdict, None
            message = self.script.send(verdict)
        except StopIteration as stop:
            return [self._end(ChildResult(stop.value))]
        except Crashed:
            self.ended = ChildExited(self.spec.key, None, Evidence(signal=11))
            return [self.ended]
        except (plan_jobs.OutOfMemoryError, KeyError) as error:
            return [self._end(ChildResult(fault=plan_jobs.fault(error)), exit_code=1)]
        with (folder / MESSAGES_FILE).open("a", encoding="utf-8") as file:
            file.write(message.model_dump_json() + "\n")
        self.waits = isinstance(message, Report)
        return [ChildMessage(self.spec.key, message)]

    def _end(self, result: ChildResult, exit_code: int = 0) -> ChildExited:
        (self.spec.folder / RESULT_FILE).write_text(result.to_json())
        self.ended = ChildExited(self.spec.key, result, Evidence(exit_code=exit_code, fault=result.fault))
        return self.ended


def _answer(body: Any) -> ChildResult:
    if isinstance(body, ResolveRequest):
        return ChildResult(plan_jobs.resolved())
    if isinstance(body, BaselinesRequest):
        write_facts(Path(body.out_dir) / FACTS_FILE, {})
        score = BaselineScore(name="majority", words="always class 1", metrics={str(body.metric): 0.5})
        return ChildResult(BaselinesResult(baselines=(score,)))
    assert isinstance(body, PlanRequest)
    return ChildResult(PlanResult(answers=tuple(plan_jobs.answer(subject, body) for subject in body.subjects)))


@dataclass
class FolderSupervisor(QuietChildren):
    """Stands where a real supervisor would, and starts no process.

    Attributes:
        ahead: Children do all they can at once, and are heard later; else they do one thing at a time, and are heard.
    """

    ahead: bool = False
    children: dict[str, FolderChild] = field(default_factory=dict)
    unheard: deque[ChildEvent] = field(default_factory=deque)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.children.clear()

    def start(self, spec: ChildSpec) -> None:
        """Make a child."""
        spec.folder.mkdir(parents=True, exist_ok=True)
        clear(spec.folder)
        (spec.folder / BEAT_FILE).touch()
        child = FolderChild(spec, train(spec.body) if isinstance(spec.body, TrainRequest) else None)
        self.children[spec.key] = child
        self._run_ahead(child)

    def _run_ahead(self, child: FolderChild) -> None:
        while self.ahead and not child.waits and child.ended is None:
            self.unheard.extend(child.go())

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        """The next thing that a child says."""
        if not self.unheard:
            able = [child for child in self.children.values() if not child.waits and child.ended is None]
            if able:
                self.unheard.extend(able[0].go())
                self.children[able[0].spec.key] = self.children.pop(able[0].spec.key)  # the others first, next time
        events = [self.unheard.popleft()] if self.unheard else []
        for event in events:
            if isinstance(event, ChildExited):
                self.children.pop(event.key, None)
        return events

    def answer(self, key: str, verdict: Verdict) -> None:
        """Let a child go on, or not."""
        child = self.children[key]
        child.waits, child.verdict = False, verdict.proceed
        self._run_ahead(child)

    def ask_stop(self, key: str) -> None:
        """It stops at what it does next."""
        self.children[key].asked_to_stop = True

    def kill(self, key: str, why: str = "now") -> None:
        """Nothing more is heard of it."""
        self.children.pop(key, None)
        self.unheard = deque(event for event in self.unheard if event.key != key)


@dataclass
class OutlivingSupervisor(FolderSupervisor):
    """The children of an agent: they outlive a control process, and say everything once more to the next one."""

    known: dict[str, FolderChild] = field(default_factory=dict)

    def __exit__(self, *_: object) -> None:
        """Nobody has asked them to end."""

    def start(self, spec: ChildSpec) -> None:
        """Make a child, and remember it."""
        super().start(spec)
        self.known[spec.key] = self.children[spec.key]

    def answer(self, key: str, verdict: Verdict) -> None:
        """Let a child go on that waits for this verdict; an earlier one is of no use to it."""
        said = read_messages(self.known[key].spec.folder)
        waits_for = max(one.point.n for one in said if isinstance(one, Report))
        if key in self.children and self.children[key].waits and verdict.n == waits_for:
            super().answer(key, verdict)

    def take_going_on(self, state: StudyState) -> dict[str, str]:
        """Return the open attempts that it knows, each with all that it has said so far still to be heard."""
        self.unheard.clear()
        self.children.clear()
        going_on: dict[str, str] = {}
        for trial in state.open_trials:
            key = attempt_key(trial.number, len(trial.attempts))
            child = self.known.get(key)
            if child is None or trial.attempts[-1].ended:
                continue
            self.children[key], going_on[key] = child, "here"
            self.unheard.extend(ChildMessage(key, one) for one in read_messages(child.spec.folder))
            self.unheard.extend([child.ended] if child.ended is not None else [])
        return going_on


def load(folder: Path, tables: Mapping[str, Any]) -> Any:
    """A study of a made-up memory model, as its file would give it."""
    document = {
        "study": {"seed": 3},
        "data": {"train": "a.jsonl", "validation": "b.jsonl"},
        "execution": {"memory_limit": "512MiB"},
        "space": {
            "train.batch_size": [2, 8, 16],
            "train.max_length": [32, 64, 4096],
            "head.hidden": [128, plan_jobs.UNDERESTIMATED],
            "head.layers": [1, plan_jobs.UNKNOWN],
            "optim.lr": {"low": 1e-5, "high": 1e-2, "log": True},
        },
    }
    for name, table in tables.items():
        document[name] = {**document.get(name, {}), **table}
    return load_document(document, folder / "study.toml", ()).config


def study_session(
    patch: pytest.MonkeyPatch,
    folder: Path,
    tables: Mapping[str, Any],
    *,
    ahead: bool = False,
    outliving: OutlivingSupervisor | None = None,
) -> SessionResult:
    """One session on the study in a folder, from its lock to its end.

    Args:
        ahead: As of :class:`FolderSupervisor`.
        outliving: Has the children, also those of a session before; None: they die with their session.

    Raises:
        Killed: As :func:`killed_at` has arranged.
    """
    config = load(folder, tables)

    def supervisor(_settings: SupervisorSettings) -> FolderSupervisor:
        return outliving or FolderSupervisor(ahead)

    if outliving is not None:
        patch.setattr(LocalNode, "take_going_on", lambda _: outliving.take_going_on(read_study(StudyLayout(folder))))
    patch.setattr(session, "Supervisor", supervisor)
    patch.setattr(session, "sweep", lambda _marker: [])
    patch.setattr(os, "fsync", lambda _fd: None)  # no power is cut here
    # No handlers of its own: a SIGTERM of `timeout`, or a Ctrl-C, is meant for the tests, and must not end one study.
    return run_session(config, Space.from_config(config), StudyLayout(folder), signals=StopSignals())


def deadly(at: Callable[[Ledger, Event], bool], way: Way, die: Callable[[], NoReturn]) -> Callable[..., Event]:
    """What ``Ledger.append`` must be for its process to die.

    Args:
        at: Whether it dies at this event.
        way: Where, next to it.
        die: Ends the process, or what stands for it.
    """
    append = Ledger.append

    def deadly_append(self: Ledger, event: Event) -> Event:
        if not at(self, event):
            return append(self, event)
        if way is Way.MIDWAY:
            line = event.model_dump_json().encode()
            os.write(self._fd, line[: len(line) // 2])
        elif way is Way.AFTER:
            append(self, event)
        raise AssertionError(die())

    return deadly_append


def killed_at(patch: pytest.MonkeyPatch, index: int, way: Way) -> None:
    """Let the control process die at the ledger's event ``index``."""

    def die() -> NoReturn:
        raise Killed

    patch.setattr(Ledger, "append", deadly(lambda ledger, _: ledger._next == index, way, die))
