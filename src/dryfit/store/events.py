"""The events of a study's ledger: one JSON object a line, never changed once written.

An event says what happened, not what follows: between any two of them, what to do next is computed from the
ledger alone.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dryfit.core.failure import Action, FailureKind
from dryfit.core.jobs import PlanAnswer, ResolveResult
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.task_facts import TaskName
from dryfit.core.settings.trial import FoldScore, Goal, MetricPoint, Outcome, Scalar
from dryfit.core.wire import Wire


class LedgerEvent(Wire):
    """What every event has: its place in the ledger, and when it was written (Unix seconds)."""

    seq: int = -1
    at: float = 0.0


class Compatibility(StrEnum):
    """What trials so far are worth after a change of the study."""

    SAME = "same"
    """As much as before."""
    EXTENDS = "extends"
    """As much as before, and there is more to draw."""
    FORKS = "forks"
    """Some of them, or all, are no trials of the study as it is now."""


class ComparabilityKey(Wire):
    """What trials rest on: the goals, the data and everything that is not drawn, and what is drawn from."""

    task: TaskName
    goals: tuple[Goal, ...]
    space: str = Field(description="JSON of the search space")
    own: dict[str, Scalar] | None = Field(
        default=None, description="the study file's own values of what may be searched; None: an older dryfit kept none"
    )
    function: str = Field(default="", description="of the user's own, that trials call")
    data: str = Field(default="", description="fingerprint of the rows; empty: there are none, or nobody has looked")
    folder: str = Field(default="", description="where the study lay: paths below it move with it")


class StudyCreated(LedgerEvent):
    """The first event of every ledger."""

    type: Literal["study_created"] = "study_created"
    id: str
    name: str
    task: TaskName
    metric: str
    direction: Direction
    also: tuple[Goal, ...] = Field(default=(), description="what is optimised beside the metric")
    seed: int
    space: str = Field(description="JSON of the search space the study began with")
    own: dict[str, Scalar] | None = Field(default=None, description="as in ``ComparabilityKey``")
    function: str = Field(default="", description="as in ``ComparabilityKey``")
    folder: str = Field(default="", description="as in ``ComparabilityKey``")

    @property
    def comparability(self) -> ComparabilityKey:
        """What its first trials rest on, before anybody has looked at the data."""
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
        """Everything that is optimised, the metric first."""
        return (Goal(name=self.metric, direction=self.direction), *self.also)


class SessionOpened(LedgerEvent):
    """A control process took the study over."""

    type: Literal["session_opened"] = "session_opened"
    pid: int
    host: str
    version: str
    total: int = Field(description="the study's total of counted trials, as asked for now")
    parallel: int = Field(default=1, description="trials side by side")
    notes: tuple[str, ...] = ()


class SessionClosed(LedgerEvent):
    """A control process left in order. A session without this event was killed."""

    type: Literal["session_closed"] = "session_closed"
    reason: str


class Resolved(LedgerEvent):
    """Data checked and tokenised, machine looked at."""

    type: Literal["resolved"] = "resolved"
    result: ResolveResult


class StudyRevised(LedgerEvent):
    """The study file has changed, and every trial so far counts as before."""

    type: Literal["study_revised"] = "study_revised"
    comparability: ComparabilityKey = Field(validation_alias="basis", serialization_alias="basis")
    compatibility: Compatibility
    reasons: tuple[str, ...] = ()


class GenerationBegan(LedgerEvent):
    """The study has changed so that its trials so far are kept, and count no longer; those that follow do.

    A generation without a trial may begin again, as another one.
    """

    type: Literal["generation_began"] = "generation_began"
    generation: int = Field(description="from 1; the first begins with the study")
    name: str = Field(description="what its Optuna mirror is called")
    comparability: ComparabilityKey = Field(validation_alias="basis", serialization_alias="basis")
    reasons: tuple[str, ...] = ()
    reused: tuple[int, ...] = Field(
        default=(),
        validation_alias="told",
        serialization_alias="told",
        description="earlier trials that samplers and pruners still learn from",
    )
    points: tuple[dict[str, Scalar], ...] = Field(default=(), description="of earlier trials, to be tried again")


class TrialAsked(LedgerEvent):
    """A trial exists: its parameters are final from here on."""

    type: Literal["trial_asked"] = "trial_asked"
    number: int
    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]
    enqueued: dict[str, Scalar] = Field(
        default={},
        validation_alias="given",
        serialization_alias="given",
        description="the enqueued point it is made from; empty: none",
    )
    seed: int
    fingerprint: str
    fold_reports: int = Field(default=1, description="numbers that each of its folds has for its reports")


class TrialPlanned(LedgerEvent):
    """What the planner says of a trial's memory, now or of an equal trial before."""

    type: Literal["trial_planned"] = "trial_planned"
    number: int
    key: str = Field(description="hash of all that decides the answer; the plan holds while it stays the same")
    answer: PlanAnswer | None = Field(default=None, description="None: the one an earlier event with this key has")


class AttemptPlaced(LedgerEvent):
    """A process for the trial is about to be started."""

    type: Literal["attempt_placed"] = "attempt_placed"
    number: int
    attempt: int
    device: str | None = None
    needs_bytes: int | None = Field(default=None, description="what it is counted with on its device, or of the host")
    terms: tuple[str, ...] = Field(default=(), description="in words: how it is run otherwise than the one before")


class AttemptStarted(LedgerEvent):
    """The process said its first line."""

    type: Literal["attempt_started"] = "attempt_started"
    number: int
    attempt: int
    pid: int
    overhead_ms: float


class FirstStepDone(LedgerEvent):
    """The first optimizer step is done, so many milliseconds after placement."""

    type: Literal["first_step"] = "first_step"
    number: int
    attempt: int
    after_ms: float


class ReportMade(LedgerEvent):
    """A validation of a running trial. Written before its verdict is even computed."""

    type: Literal["report"] = "report"
    number: int
    attempt: int
    point: MetricPoint


class VerdictGiven(LedgerEvent):
    """The answer to report ``n``, and what the pruner must remember."""

    type: Literal["verdict"] = "verdict"
    number: int
    n: int
    proceed: bool
    system_attrs: dict[str, float] = Field(default_factory=dict[str, float])
    reason: str = ""


class CheckpointMade(LedgerEvent):
    """The trial can go on from here."""

    type: Literal["checkpoint"] = "checkpoint"
    number: int
    attempt: int
    step: int


class FailureFacts(Wire):
    """What went wrong with an attempt and what followed."""

    kind: FailureKind
    sentence: str
    action: Action
    error_type: str = Field(default="", description="qualified class of the exception, if there was one")
    error: str = Field(default="", description="what the exception said, its first lines")
    place: str = Field(default="", description="where in the code it came from: file, line and function")
    detail: str = Field(default="", description="lines for the story: which batch, what memory, the innermost frames")


class AttemptEnded(LedgerEvent):
    """The process is gone; ``failure`` is None where it left a result."""

    type: Literal["attempt_ended"] = "attempt_ended"
    number: int
    attempt: int
    failure: FailureFacts | None = None


class Observed(Wire):
    """Memory the last process of a trial really took, as far as it is known; see ``TrainResult``."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None


class DeviceSetAside(LedgerEvent):
    """A device gets no more trials in this session."""

    type: Literal["device_set_aside"] = "device_set_aside"
    device: str
    reason: str


class ParallelSet(LedgerEvent):
    """How many trials may run side by side from now on, and why not more."""

    type: Literal["parallel_set"] = "parallel_set"
    parallel: int
    reason: str


class TrialFinished(LedgerEvent):
    """The trial's end. Nothing about the trial follows."""

    type: Literal["trial_finished"] = "trial_finished"
    number: int
    outcome: Outcome
    value: float | None = None
    also: tuple[float, ...] = Field(default=(), description="values of the study's further goals, in their order")
    best: int | None = Field(default=None, description="index of the report that gave the value; None with folds")
    folds: tuple[FoldScore, ...] = Field(default=(), description="what each fold has come to that was done, in order")
    steps: int = 0
    reason: str = ""
    observed: Observed | None = None


Event = Annotated[
    StudyCreated
    | SessionOpened
    | SessionClosed
    | Resolved
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
    | ParallelSet
    | TrialFinished,
    Field(discriminator="type"),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
