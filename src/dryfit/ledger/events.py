"""The events of a study's ledger: one JSON object per line, never changed once written.

An event says what happened, not what follows from it: the next step is computed from the ledger alone.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from dryfit.settings.choices import Direction
from dryfit.settings.devices import HERE, with_node
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.task_facts import TaskName
from dryfit.settings.training_messages import BaselinesResult, ResolveResult
from dryfit.settings.trial import FoldScore, Goal, MetricPoint, Outcome, Scalar
from dryfit.settings.wire import Wire

_Devices = Annotated[str, AfterValidator(with_node)]
"""A device or several, as ``here/0``; older versions wrote ``0``."""


class LedgerEvent(Wire):
    """Fields of every event: its index in the ledger, and when it was written (Unix seconds)."""

    seq: int = -1
    at: float = 0.0


class TrialEvent(LedgerEvent):
    """An event of the trial with this number."""

    number: int


class AttemptEvent(TrialEvent):
    """An event of one of the trial's attempts, counted from 1."""

    attempt: int


class Compatibility(StrEnum):
    """Whether trials so far still count after a change of the study."""

    SAME = "same"
    """All of them count."""
    EXTENDS = "extends"
    """All of them count, and the search space has grown."""
    FORKS = "forks"
    """Some of them, or all, do not count: a new generation begins."""


class ComparabilityKey(Wire):
    """Everything that must be equal for trials to be compared: goals, data, fixed settings and search space."""

    task: TaskName
    goals: tuple[Goal, ...]
    space: str = Field(description="JSON of the search space")
    own: dict[str, Scalar] | None = Field(
        default=None, description="the study file's values of all searchable keys; None: written by an older dryfit"
    )
    function: str = Field(default="", description="the user's own function, where the task is `objective`")
    data: str = Field(default="", description="fingerprint of the rows; empty: none, or not read yet")
    folder: str = Field(default="", description="the study's folder: paths below it move with it")


class StudyCreated(LedgerEvent):
    """The first event of every ledger."""

    type: Literal["study_created"] = "study_created"
    id: str
    name: str
    task: TaskName
    metric: str
    direction: Direction
    also: tuple[Goal, ...] = Field(default=(), description="further goals beside the metric")
    seed: int
    space: str = Field(description="JSON of the first search space")
    own: dict[str, Scalar] | None = Field(default=None, description="as in ``ComparabilityKey``")
    function: str = Field(default="", description="as in ``ComparabilityKey``")
    folder: str = Field(default="", description="as in ``ComparabilityKey``")
    points_from: str = Field(default="", description="what ``search.enqueue_from`` was; empty: nothing")
    points: tuple[dict[str, Scalar], ...] = Field(default=(), description="the points of another study to try first")

    @property
    def comparability(self) -> ComparabilityKey:
        """The key of the first trials, before the data has been read."""
        return ComparabilityKey(
            task=self.task,
            goals=self.goals,
            space=self.space,
            own=self.own,
            function=self.function,
            folder=self.folder,
        )

    @property
    def goals(self) -> tuple[Goal, ...]:
        """All goals, the metric first."""
        return (Goal(name=self.metric, direction=self.direction), *self.also)


class SessionOpened(LedgerEvent):
    """A control process began to work on the study."""

    type: Literal["session_opened"] = "session_opened"
    pid: int
    host: str
    version: str
    total: int = Field(description="the number of counted trials asked for in this session")
    parallel: int = Field(default=1, description="trials run at the same time")
    notes: tuple[str, ...] = ()


class SessionClosed(LedgerEvent):
    """A control process ended normally. A session without this event was killed."""

    type: Literal["session_closed"] = "session_closed"
    reason: str


class Resolved(LedgerEvent):
    """The data was checked and tokenised, and the machine examined."""

    type: Literal["resolved"] = "resolved"
    result: ResolveResult


class BaselinesComputed(LedgerEvent):
    """What the metric is worth without a model was found out."""

    type: Literal["baselines"] = "baselines"
    key: str = Field(description="hash of all that decides them: they hold while it is the same")
    result: BaselinesResult


class StudyRevised(LedgerEvent):
    """The study file changed in a way that keeps all trials comparable."""

    type: Literal["study_revised"] = "study_revised"
    comparability: ComparabilityKey = Field(validation_alias="basis", serialization_alias="basis")
    compatibility: Compatibility
    reasons: tuple[str, ...] = ()


class GenerationBegan(LedgerEvent):
    """The study changed so that its trials so far no longer count; they are kept.

    A generation that has no trial yet is replaced by the next one.
    """

    type: Literal["generation_began"] = "generation_began"
    generation: int = Field(description="from 1; the first begins with the study")
    name: str = Field(description="name of its Optuna mirror")
    comparability: ComparabilityKey = Field(validation_alias="basis", serialization_alias="basis")
    reasons: tuple[str, ...] = ()
    reused: tuple[int, ...] = Field(
        default=(),
        validation_alias="told",
        serialization_alias="told",
        description="earlier trials that samplers and pruners still learn from",
    )
    points: tuple[dict[str, Scalar], ...] = Field(default=(), description="earlier points to try again")


class TrialAsked(TrialEvent):
    """A trial was created; its parameters do not change any more."""

    type: Literal["trial_asked"] = "trial_asked"
    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]
    enqueued: dict[str, Scalar] = Field(
        default={},
        validation_alias="given",
        serialization_alias="given",
        description="the enqueued point it was made from; empty: none",
    )
    seed: int
    fingerprint: str
    fold_reports: int = Field(default=1, description="report indices reserved for each fold")
    fallback: str = Field(default="", description="why another sampler drew it, in words; empty: the study's own did")


class TrialPlanned(TrialEvent):
    """The planner answered for a trial; the answer may be that of an equal trial before."""

    type: Literal["trial_planned"] = "trial_planned"
    key: str = Field(description="hash of everything that decides the answer: the plan is valid while it is the same")
    answer: PlanAnswer | None = Field(default=None, description="None: as in an earlier event with this key")


class AttemptPlaced(AttemptEvent):
    """A process for the trial is about to start."""

    type: Literal["attempt_placed"] = "attempt_placed"
    node: str = HERE
    device: _Devices | None = Field(default=None, description="its device, or several; None: the CPU")
    needs_bytes: int | None = Field(default=None, description="memory reserved for it on its device, or on the host")
    plan: str | None = Field(default=None, description="key of the plan that it is run by; None: the last one made")
    terms: tuple[str, ...] = Field(default=(), description="how it runs differently from the attempt before, in words")


class AttemptStarted(AttemptEvent):
    """The process wrote its first message; or a later session goes on with it, as it runs on a node."""

    type: Literal["attempt_started"] = "attempt_started"
    pid: int
    overhead_ms: float
    again: bool = Field(default=False, description="an earlier session had heard it, and this one goes on with it")


class FirstStepDone(AttemptEvent):
    """The first optimizer step is done, ``after_ms`` milliseconds after placement."""

    type: Literal["first_step"] = "first_step"
    after_ms: float


class ReportMade(AttemptEvent):
    """A running trial was validated. Written before the pruner's verdict is computed."""

    type: Literal["report"] = "report"
    point: MetricPoint


class VerdictGiven(TrialEvent):
    """The pruner's answer to report ``n``, with the state it must remember."""

    type: Literal["verdict"] = "verdict"
    n: int
    proceed: bool
    system_attrs: dict[str, float] = Field(default_factory=dict[str, float])
    reason: str = ""


class CheckpointMade(AttemptEvent):
    """The trial wrote a checkpoint that it can resume from."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int


class FaultDetail(Wire):
    """What a process left that says more of its failure."""

    error_type: str = Field(default="", description="qualified class of the exception, if any")
    error: str = Field(default="", description="first lines of the exception's message")
    place: str = Field(default="", description="file, line and function that raised it")
    detail: str = Field(default="", description="further lines: batch, memory, innermost frames")


class FailureFacts(FaultDetail):
    """The failure of an attempt, and the action that followed."""

    kind: FailureKind
    sentence: str
    action: Action
    phase: str = Field(default="", description="what the attempt was doing; empty: unknown")


class AttemptEnded(AttemptEvent):
    """The process ended; ``failure`` is None where it left a result."""

    type: Literal["attempt_ended"] = "attempt_ended"
    failure: FailureFacts | None = None


class Observed(Wire):
    """Memory used by the last process of a trial, as far as it is known; see ``TrainResult``."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None


class DeviceSetAside(LedgerEvent):
    """A device is not used any more in this session."""

    type: Literal["device_set_aside"] = "device_set_aside"
    device: _Devices
    reason: str


class NodeJoined(LedgerEvent):
    """An agent has joined with its machine, or has come back after its trials were given up."""

    type: Literal["node_joined"] = "node_joined"
    node: str
    agent: str = Field(description="the agent's own name, which no other has")
    epoch: int = Field(description="1, and one more whenever the agent has ended its trials and come back")
    host: str
    pid: int
    boot: str = Field(default="", description="what identifies its machine since that was started; empty: not known")
    started: int = Field(default=0, description="when the agent began, in ticks since then")
    cores: int
    host_bytes: int
    devices: tuple[str, ...] = Field(description="its CUDA devices, as they are called there")
    specs: tuple[DeviceSpec | None, ...] = Field(default=(), description="what each is; None: not known")


class NodeLost(LedgerEvent):
    """A node was given up, with the trials that ran there."""

    type: Literal["node_lost"] = "node_lost"
    node: str
    epoch: int
    why: str
    trials: int = Field(description="how many trials ran there")


class ParallelSet(LedgerEvent):
    """The number of trials that may run at the same time was changed."""

    type: Literal["parallel_set"] = "parallel_set"
    parallel: int
    reason: str


class TrialFinished(TrialEvent):
    """The trial ended. No event about it follows."""

    type: Literal["trial_finished"] = "trial_finished"
    outcome: Outcome
    value: float | None = None
    also: tuple[float, ...] = Field(default=(), description="values of the study's further goals, in their order")
    best: int | None = Field(default=None, description="index of the best report; None with folds")
    folds: tuple[FoldScore, ...] = Field(default=(), description="scores of the folds that were done, in order")
    steps: int = 0
    reason: str = ""
    observed: Observed | None = None


Event = Annotated[
    StudyCreated
    | SessionOpened
    | SessionClosed
    | Resolved
    | BaselinesComputed
    | StudyRevised
    | GenerationBegan
    | TrialAsked
    | TrialPlanned
    | AttemptPlaced
    | AttemptStarted
    | FirstStepDone
    | ReportMade
    | VerdictGiven
    | CheckpointMade
    | AttemptEnded
    | DeviceSetAside
    | NodeJoined
    | NodeLost
    | ParallelSet
    | TrialFinished,
    Field(discriminator="type"),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
