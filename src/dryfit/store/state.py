"""What a ledger says of a study's parts: its attempts, plans, trials and sessions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dryfit.core.failure import PERMITTED, Action, PastFailure
from dryfit.core.jobs import PlanAnswer
from dryfit.core.jobs.memory import ExecutionChoice
from dryfit.core.settings.trial import FoldScore, MetricPoint, Outcome, Scalar, TrialRecord, fold_spreads
from dryfit.store.events import ComparabilityKey, FailureFacts, Observed


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
        fallbacks_taken: How many of its fallbacks were taken since, each after the device's memory did not suffice.
        misses: How many attempts ran out of the device's memory all the same.
    """

    key: str
    answer: PlanAnswer
    fallbacks_taken: int = 0
    misses: int = 0

    @property
    def fallbacks_left(self) -> int:
        """Fallbacks that have not been tried."""
        return len(self.answer.fallbacks) - self.fallbacks_taken

    @property
    def execution(self) -> ExecutionChoice | None:
        """What the next attempt is to be run with; None: as wished."""
        return self.answer.fallbacks[self.fallbacks_taken - 1] if self.fallbacks_taken else self.answer.execution


@dataclass(frozen=True, slots=True)
class VerdictState:
    """The answer to a report."""

    proceed: bool
    reason: str


@dataclass(slots=True)
class GenerationState:
    """Trials that rest on the same, all others being of earlier generations or later ones.

    Attributes:
        number: From 1.
        name: What its Optuna mirror is called.
        comparability: What its trials rest on.
        began_at_s: Unix seconds.
        first: The number that its first trial has.
        session: Index of the session in which it began.
        reasons: Why the one before it could not go on.
        reused: Numbers of earlier trials that samplers and pruners learn from.
        points: Points of earlier trials that are tried again.
    """

    number: int
    name: str
    comparability: ComparabilityKey
    began_at_s: float
    first: int = 0
    session: int = 0
    reasons: tuple[str, ...] = ()
    reused: tuple[int, ...] = ()
    points: tuple[dict[str, Scalar], ...] = ()


@dataclass(slots=True)
class TrialState:
    """Everything the ledger knows of one trial.

    Attributes:
        fold_reports: Numbers that each of its folds has for its reports.
        generation: The number of its generation.
        own: The study file's own values when it was asked for; empty where they are those of today.
    """

    number: int
    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]
    seed: int
    fingerprint: str
    fold_reports: int = 1
    generation: int = 1
    own: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    reports: list[MetricPoint] = field(default_factory=list[MetricPoint])
    verdicts: dict[int, VerdictState] = field(default_factory=dict[int, VerdictState])
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    attempts: list[AttemptState] = field(default_factory=list[AttemptState])
    plan: PlanState | None = None
    enqueued: dict[str, Scalar] = field(default_factory=dict[str, Scalar])
    asked_at_s: float = 0.0
    finished_at_s: float | None = None
    outcome: Outcome | None = None
    value: float | None = None
    also: tuple[float, ...] = ()
    best: int | None = None
    folds: tuple[FoldScore, ...] = ()
    steps: int = 0
    reason: str = ""
    observed: Observed | None = None

    @property
    def past_failures(self) -> tuple[PastFailure, ...]:
        """Failures of the attempts so far, oldest first."""
        found: list[PastFailure] = []
        farthest = -1
        for attempt in self.attempts:
            # An attempt that only got as far as one before it has made no progress.
            further = attempt.checkpoint_step is not None and attempt.checkpoint_step > farthest
            farthest = max(farthest, attempt.checkpoint_step if attempt.checkpoint_step is not None else -1)
            if attempt.failure is not None:
                found.append(PastFailure(attempt.failure.kind, further, attempt.failure.action, attempt.device))
        return tuple(found)

    @property
    def made_progress(self) -> bool:
        """Whether the last attempt reached a checkpoint further on than any before it."""
        *earlier, last = [attempt.checkpoint_step for attempt in self.attempts]
        return last is not None and all(step is None or step < last for step in earlier)

    @property
    def point_is_to_blame(self) -> bool:
        """Whether it failed for what its parameters are: they would fail again."""
        failures = [attempt.failure for attempt in self.attempts if attempt.failure is not None]
        if self.outcome is not Outcome.FAILED or not failures:
            return False
        diagnosed = [one for one in failures[:-1] if one.action is Action.DIAGNOSE]
        return any(PERMITTED[one.kind].blames_point for one in (failures[-1], *diagnosed))

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its values of all goals, the metric's first; None unless it completed with a value."""
        return None if self.value is None else (self.value, *self.also)

    @property
    def spreads(self) -> tuple[float, ...]:
        """How far its folds lie apart, of each goal; empty unless it completed with folds."""
        return () if self.value is None else fold_spreads(self.folds)

    def record(self) -> TrialRecord:
        """The trial as samplers and pruners see it.

        One that failed for what its parameters are is told as refused: from failed trials no sampler learns anything.
        """
        return TrialRecord(
            number=self.number,
            params=self.internal,
            distributions=self.distributions,
            outcome=Outcome.REFUSED if self.point_is_to_blame else self.outcome,
            value=self.value,
            reports=tuple(self.reports),
            system_attrs=dict(self.system_attrs),
            also=self.also,
            enqueued=self.enqueued,
            own=self.own,
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
