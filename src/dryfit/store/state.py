"""What a ledger says of a study's parts: its attempts, plans, trials and sessions."""

from dataclasses import dataclass, field

from dryfit.core.failure import PastFailure
from dryfit.core.jobs import PlanAnswer
from dryfit.core.memory import ExecutionChoice
from dryfit.core.trial import MetricPoint, Outcome, Scalar, TrialRecord
from dryfit.store.events import FailureFacts, Observed, VerdictGiven


@dataclass(slots=True)
class AttemptState:
    """One process of a trial. ``ended`` is False while it runs, or where the control process died with it.

    Attributes:
        session: Index of the session that placed it; -1: none had begun.
    """

    number: int
    placed_at_s: float
    device: str | None = None
    needs_bytes: int | None = None
    terms: tuple[str, ...] = ()
    pid: int | None = None
    overhead_ms: float | None = None
    first_step_ms: float | None = None
    checkpoint_step: int | None = None
    checkpoint_at_s: float | None = None
    session: int = -1
    ended: bool = False
    ended_at_s: float | None = None
    failure: FailureFacts | None = None


@dataclass(slots=True)
class PlanState:
    """The plan of a trial.

    Attributes:
        key: See :class:`~dryfit.store.events.TrialPlanned`.
        rung: How many of its fallbacks were taken since, each after the device's memory did not suffice.
        misses: How many attempts ran out of the device's memory all the same.
    """

    key: str
    answer: PlanAnswer
    rung: int = 0
    misses: int = 0

    @property
    def rungs_left(self) -> int:
        """Fallbacks that have not been tried."""
        return len(self.answer.fallbacks) - self.rung

    @property
    def execution(self) -> ExecutionChoice | None:
        """What the next attempt is to be run with; None: as wished."""
        return self.answer.fallbacks[self.rung - 1] if self.rung else self.answer.execution


@dataclass(slots=True)
class TrialState:
    """Everything the ledger knows of one trial."""

    number: int
    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]
    seed: int
    fingerprint: str
    reports: list[MetricPoint] = field(default_factory=list[MetricPoint])
    verdicts: dict[int, VerdictGiven] = field(default_factory=dict[int, VerdictGiven])
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    attempts: list[AttemptState] = field(default_factory=list[AttemptState])
    plan: PlanState | None = None
    given: dict[str, Scalar] = field(default_factory=dict[str, Scalar])
    asked_at_s: float = 0.0
    finished_at_s: float | None = None
    outcome: Outcome | None = None
    value: float | None = None
    also: tuple[float, ...] = ()
    best: int | None = None
    steps: int = 0
    reason: str = ""
    observed: Observed | None = None

    @property
    def past_failures(self) -> tuple[PastFailure, ...]:
        """Failures of the attempts so far, oldest first."""
        return tuple(
            PastFailure(
                attempt.failure.kind, attempt.checkpoint_step is not None, attempt.failure.action, attempt.device
            )
            for attempt in self.attempts
            if attempt.failure is not None
        )

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its values of all goals, the metric's first; None unless it completed with a value."""
        return None if self.value is None else (self.value, *self.also)

    def record(self) -> TrialRecord:
        """The trial as samplers and pruners see it."""
        return TrialRecord(
            number=self.number,
            params=self.internal,
            distributions=self.distributions,
            outcome=self.outcome,
            value=self.value,
            reports=tuple(self.reports),
            system_attrs=dict(self.system_attrs),
            also=self.also,
            given=self.given,
        )


@dataclass(slots=True)
class SessionState:
    """One stretch of work of a control process.

    Attributes:
        set_aside: Devices that get no more trials, each with the reason.
        side_by_side: How many trials may run at once, as it was found out last; None: as asked for.
        side_by_side_reason: Why not more.
    """

    opened_at_s: float
    last_at_s: float
    total: int
    parallel: int = 1
    host: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()
    closed: str | None = None
    set_aside: dict[str, str] = field(default_factory=dict[str, str])
    side_by_side: int | None = None
    side_by_side_reason: str = ""
    pid: int | None = None
