"""A study loop whose children do the stand-ins' work at once, in this process, and which can be killed at any event."""

import json
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plan_jobs
from dryfit.ledger.events import Event, SessionClosed, SessionOpened, StudyCreated
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildMessage, ChildSpec
from dryfit.processes.gpus import GpuMonitor
from dryfit.processes.node import DeviceFacts, HostMemory, LocalNode, NodeFacts, read_host_memory
from dryfit.search.space import Space
from dryfit.settings.devices import HERE
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult
from dryfit.settings.plan_messages import PlanRequest, PlanResult
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.training_messages import FinalRequest, FinalResult, TrainRequest
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import Checkpointed, Report, Started
from dryfit.study.context import StudyContext
from dryfit.study.driver import StopRequests
from dryfit.study.loop import TrialDecider
from dryfit.study.next_step import End
from quiet_children import QuietChildren


class Killed(BaseException):
    """The control process is gone."""


def config(**tables: dict[str, Any]) -> StudyConfig:
    """A study that plans for a limit."""
    document: dict[str, dict[str, Any]] = {
        "study": {"trials": 4, "seed": 3},
        "data": {"train": "a.jsonl", "validation": "b.jsonl"},
        "search": {"mirror": "none", "startup_trials": 4, "defaults_first": False},
        "execution": {"memory_limit": "512MiB"},
    }
    for table, keys in tables.items():
        document[table] = document.get(table, {}) | keys
    return StudyConfig.model_validate_json(json.dumps(document))


@dataclass(frozen=True)
class Ends:
    """How a scripted process ends.

    Attributes:
        result: Its last word, if it leaves one.
        evidence: What is known of its end.
        checkpoint: The step of a checkpoint that it reached before.
    """

    result: ChildResult | None
    evidence: Evidence
    checkpoint: int | None = None


Script = Callable[[TrainRequest], Ends | None]
"""How a process of a trial ends; None: as the stand-in does."""


@dataclass
class Clock:
    """A clock that a waiting loop need not wait for: every look at it takes a second."""

    now_s: float = 1_000.0

    def __call__(self) -> float:
        """Unix seconds."""
        self.now_s += 1.0
        return self.now_s


def one_node(cores: int = 1, *devices: DeviceFacts, host_bytes: int = 2**36) -> dict[str, NodeFacts]:
    """This machine, with so many cores and such devices."""
    return {HERE: NodeFacts(cores, host_bytes, devices)}


def _no_device(_key: str, _device: str, _planned_bytes: int | None) -> None:
    """Nobody hears of devices."""


@dataclass
class InstantSupervisor(QuietChildren):
    """Runs stand-ins where a real supervisor would start processes."""

    answerer: plan_jobs.Answerer = plan_jobs.answer
    script: Script = lambda _: None
    started: list[ChildSpec] = field(default_factory=list)
    events: deque[ChildEvent] = field(default_factory=deque)
    most_at_once: int = 0
    idle: Callable[[], None] = lambda: None

    def start(self, spec: ChildSpec) -> None:
        """Do the whole job; what it says is heard later, piece by piece."""
        self.started.append(spec)
        self.events.append(ChildMessage(spec.key, Started(pid=1, overhead_ms=1.0)))
        for event in self._work(spec):
            self.events.append(event)
        trials = {event.key for event in self.events if event.key.startswith("trial")}
        self.most_at_once = max(self.most_at_once, len(trials))

    def _work(self, spec: ChildSpec) -> list[ChildEvent]:
        body = spec.body
        try:
            if isinstance(body, PlanRequest):
                answers = tuple(self.answerer(subject, body) for subject in body.subjects)
                return [ChildExited(spec.key, ChildResult(PlanResult(answers=answers)), Evidence(exit_code=0))]
            training = body.training if isinstance(body, FinalRequest) else body
            assert isinstance(training, TrainRequest)
            ends = self.script(training)
            if ends is not None:
                reached = (
                    [] if ends.checkpoint is None else [ChildMessage(spec.key, Checkpointed(step=ends.checkpoint))]
                )
                return [*reached, ChildExited(spec.key, ends.result, ends.evidence)]
            if plan_jobs.runs_out(training):
                raise plan_jobs.OutOfMemoryError("CUDA out of memory")
            done = plan_jobs.result(training)
            assert done.value is not None
            point = MetricPoint(n=0, step=3, epoch=1.0, value=done.value, metrics={})
            result = ChildResult(done)
            if isinstance(body, FinalRequest):
                scores = FinalResult(training=done, step=3, validation={}, test=None, rows={}, model_dir=body.model_dir)
                result = ChildResult(scores)
            end = ChildExited(spec.key, result, Evidence(exit_code=0))
            return [ChildMessage(spec.key, Report(point=point)), end]
        except Crash:
            return [ChildExited(spec.key, None, Evidence(signal=signal.SIGSEGV))]
        except (plan_jobs.OutOfMemoryError, KeyError) as error:
            return [ChildExited(spec.key, ChildResult(fault=plan_jobs.fault(error)), Evidence(exit_code=1))]

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        """The next thing said; where nobody says anything, a test lets time pass."""
        if not self.events:
            self.idle()
        return [self.events.popleft()] if self.events else []

    def kill(self, key: str, why: str = "now") -> None:
        """Nothing more is heard of a child."""
        self.events = deque(event for event in self.events if event.key != key)

    def planned(self) -> list[PlanRequest]:
        """Every PLAN child that was started."""
        return [spec.body for spec in self.started if isinstance(spec.body, PlanRequest)]

    def trained(self) -> list[TrainRequest]:
        """Every TRAIN child that was started."""
        return [spec.body for spec in self.started if isinstance(spec.body, TrainRequest)]


class Crash(BaseException):
    """Raised by a scripted answerer: the planner's process dies of a signal."""


@dataclass
class Run:
    """How a session went."""

    end: End | None
    state: StudyState
    supervisor: InstantSupervisor
    events: list[Event]


def run(
    folder: Path,
    study: StudyConfig,
    *,
    kill_after: int | None = None,
    answerer: plan_jobs.Answerer = plan_jobs.answer,
    script: Script = lambda _: None,
    change: Callable[[StudyContext], StudyContext] = lambda study: study,
    idle: Callable[[], None] = lambda: None,
    devices: GpuMonitor | None = None,
    placed: Callable[[str, str, int | None], None] = _no_device,
    host: Callable[[Iterable[int]], HostMemory] = read_host_memory,
    **loop: Any,
) -> Run:
    """One session on the study in ``folder``; it is killed once the ledger has ``kill_after`` events.

    ``idle`` is called whenever the loop waits and nothing happens; ``devices``, ``placed`` and ``host`` are those of
    the node; ``loop`` are further arguments of the loop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layout, state, space = StudyLayout(folder), StudyState(), Space.from_config(study)
    events: list[Event] = []
    ledger = Ledger(layout.ledger, apply=lambda event: (state.apply(event), events.append(event))[0])

    def append(event: Event) -> Event:
        if kill_after is not None and len(events) >= kill_after:
            raise Killed
        return Ledger.append(ledger, event)

    ledger.append = append  # type: ignore[method-assign]
    supervisor = InstantSupervisor(answerer, script, idle=idle)
    end = None
    try:
        if state.created is None:
            ledger.append(_created(study, space))
        ledger.append(SessionOpened(pid=1, host="h", version="0", total=study.study.trials))
        context = StudyContext(
            config=study,
            layout=layout,
            space=space,
            ledger=ledger,
            state=state,
            resolved=plan_jobs.resolved(),
            nodes=one_node(),
        )
        stops = StopRequests(layout.stop_request, supervisor.wake)
        node = LocalNode(supervisor, devices, placed=placed, host=host)
        end = TrialDecider(change(context), node, stops, **{"clock": Clock(), **loop}).run()
        ledger.append(SessionClosed(reason=end))
    except Killed:
        pass
    finally:
        ledger.close()
    return Run(end, state, supervisor, events)


def _created(study: StudyConfig, space: Space) -> StudyCreated:
    settings = study.study
    return StudyCreated(
        id="i",
        name="n",
        task=settings.task,
        metric=settings.metric,
        direction=settings.resolved_direction,
        seed=settings.seed,
        space=space.to_json(),
    )
