"""Studies whose file changes between sessions: whole sessions, but for their children, which answer at once."""

import json
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest import mock

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from dryfit.ledger.events import Event
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildMessage, ChildSpec
from dryfit.search.follower_process import FollowerStatus, LedgerFollower, writer_of
from dryfit.search.followers import Mirror
from dryfit.search.space import Space
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.training_messages import ObjectiveRequest, ResolveResult, TrainRequest, TrainResult
from dryfit.settings.trial import MetricPoint, Scalar
from dryfit.settings.wire import RESULT_FILE, Report, Started
from dryfit.study import session
from quiet_children import QuietChildren


def space_of(models: int, **keys: Any) -> dict[str, Any]:
    """A space with so many models, two kinds of them, and other keys than usual; None leaves one out."""
    names = [f"m{index}" for index in range(models)]
    space: dict[str, Any] = {
        "model.name": names,
        "train.batch_size": [
            {"choices": [8, 16], "when": {"model.name": names[:5]}},
            {"choices": [16, 32], "when": {"model.name": names[5:]}},
        ],
        "optim.lr": {"low": 1e-5, "high": 1e-2, "log": True},
        "head.dropout": {"low": 0.0, "high": 0.5},
    }
    given = {name.replace("__", "."): value for name, value in keys.items()}
    return {name: value for name, value in (space | given).items() if value is not None}


SPACE = space_of(9)
SAMPLERS = {
    "tpe": {"startup_trials": 4},
    "random": {},
    "qmc": {},
    "nsga2": {"population_size": 4},
}


class Killed(BaseException):
    """The control process is gone."""


def config(
    sampler: str = "tpe", trials: int = 8, space: dict[str, Any] | None = None, **tables: dict[str, Any]
) -> StudyConfig:
    """A study of models; by default the one that all changes start from."""
    document: dict[str, Any] = {
        "study": {"trials": trials, "seed": 3, "name": "toy", "baselines_s": 0},
        "data": {"train": "/a.jsonl", "validation": "/b.jsonl"},
        "search": {"mirror": "none", "sampler": sampler, **SAMPLERS[sampler]},
        "execution": {"device": "cpu"},
        "space": SPACE if space is None else space,
    }
    for table, keys in tables.items():
        document[table] = document.get(table, {}) | keys
    return StudyConfig.model_validate_json(json.dumps(document))


def own_function(space: dict[str, Any], trials: int = 8, **tables: dict[str, Any]) -> StudyConfig:
    """A study of a function of the user's own."""
    document: dict[str, Any] = {
        "study": {"trials": trials, "seed": 3, "name": "toy", "task": "objective"},
        "objective": {"function": "mine:f"},
        "search": {"mirror": "none", "startup_trials": 4},
        "space": space,
    }
    for table, keys in tables.items():
        document[table] = document.get(table, {}) | keys
    return StudyConfig.model_validate_json(json.dumps(document))


def score(params: dict[str, Scalar]) -> float:
    """A value that depends on the parameters alone."""
    numbers = [float(value) for value in params.values() if isinstance(value, int | float)]
    return round(1 / (1 + sum(abs(number - 0.3) for number in numbers)), 6)


@dataclass
class AtOnce(QuietChildren):
    """Answers where a real supervisor would start processes; each trial reports once and completes."""

    started: list[ChildSpec] = field(default_factory=list)
    events: deque[ChildEvent] = field(default_factory=deque)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left behind."""

    def start(self, spec: ChildSpec) -> None:
        """Do the whole job."""
        self.started.append(spec)
        body = spec.body
        assert isinstance(body, ObjectiveRequest | TrainRequest)
        if isinstance(body, TrainRequest):
            value, goals = score(body.config.params), 1 + len(body.config.also)
        else:
            value, goals = score(body.params), len(body.objective.goals)
        point = MetricPoint(n=0, step=3, epoch=1.0, value=value, metrics={})
        done = TrainResult(value=value, also=(0.5,) * (goals - 1), best=0, steps=3)
        spec.folder.mkdir(parents=True, exist_ok=True)
        (spec.folder / RESULT_FILE).write_text(ChildResult(done).to_json())
        self.events.append(ChildMessage(spec.key, Started(pid=1, overhead_ms=1.0)))
        self.events.append(ChildMessage(spec.key, Report(point=point)))
        self.events.append(ChildExited(spec.key, ChildResult(done), Evidence(exit_code=0)))

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        """The next thing said."""
        return [self.events.popleft()] if self.events else []


@contextmanager
def _children(data: str, revisions: dict[str, str]):
    resolved = ResolveResult(
        data_fingerprint=data, splits={}, revisions=revisions, device=DeviceKind.CPU, device_count=0, versions={}
    )
    with (
        mock.patch.object(session, "Supervisor", return_value=AtOnce()),
        mock.patch.object(session, "prepare", return_value=resolved),
        mock.patch.object(session, "sweep", return_value=[]),
    ):
        yield


@dataclass
class Watch:
    """What an observer is told."""

    notes: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def on_open(self, layout: StudyLayout) -> None:
        """Nothing to look at."""

    def on_event(self, event: Event, state: StudyState) -> None:
        """Keep it."""
        self.events.append(event)

    def on_message(self, number: int, message: object) -> None:
        """Nothing to keep."""

    def on_note(self, text: str) -> None:
        """Keep it."""
        self.notes.append(text)


def run(
    folder: Path,
    study: StudyConfig,
    *,
    data: str = "rows",
    revisions: dict[str, str] | None = None,
    kill: Callable[[Ledger, Event], None] | None = None,
    watch: Watch | None = None,
) -> StudyState:
    """One session on the study in ``folder``.

    Args:
        folder: Where it lies.
        study: Its file.
        data: Fingerprint of its rows.
        revisions: What its models are now.
        kill: Called before each event is written; may raise :class:`Killed`.
        watch: Who is told.
    """
    append = Ledger.append

    def killing(self: Ledger, event: Event) -> Event:
        if kill is not None:
            kill(self, event)
        return append(self, event)

    with _children(data, revisions or {}), mock.patch.object(Ledger, "append", killing):
        observers = [watch] if watch is not None else []
        return session.run_session(study, Space.from_config(study), StudyLayout(folder), observers).state


def mirror_into(ledger: Path, journal: Path) -> LedgerFollower:
    """What has mirrored a ledger into a journal in this process, and goes on when it is asked to."""
    status = FollowerStatus(journal.with_suffix(".json"))
    target = Mirror(f"journal:{journal}")
    follower = LedgerFollower(
        ledger, new_writer=lambda first: writer_of(target, ledger.parent, first, status), status=status
    )
    assert follower.catch_up()
    return follower


def mirrored(folder: Path, name: str) -> optuna.Study:
    """A generation of the study in ``folder``, as Optuna reads it from a mirror made now."""
    journal = folder / "optuna.journal"
    mirror_into(folder / "ledger.jsonl", journal)
    return optuna.load_study(study_name=name, storage=JournalStorage(JournalFileBackend(str(journal))))
