"""The states of a study's attempts, plans, trials, generations and sessions, as its ledger has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dryfit.core.failure import PERMITTED, Action, PastFailure
from dryfit.core.jobs.memory import ExecutionChoice
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.settings.trial import FoldScore, MetricPoint, Outcome, Scalar, TrialRecord, fold_spreads
from dryfit.store.events import ComparabilityKey, FailureFacts, Observed


@dataclass(slots=True)
class AttemptState:
    """One process of a trial. ``ended`` is False while it runs, or if the control process died with it.

    Attributes:
        session: Index of the session that placed it; -1: none.
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
        fallbacks_taken: How many of its fallbacks were taken, each after an attempt ran out of device memory.
        misses: How many attempts ran out of device memory although they were planned.
    """

    key: str
    answer: PlanAnswer
    fallbacks_taken: int = 0
    misses: int = 0

    @property
    def fallbacks_left(self) -> int:
        """Number of fallbacks that have not been tried."""
        return len(self.answer.fallbacks) - self.fallbacks_taken

    @property
    def execution(self) -> ExecutionChoice | None:
        """How the next attempt is to be executed; None: as the study file says."""
        return self.answer.fallbacks[self.fallbacks_taken - 1] if self.fallbacks_taken else self.answer.execution


@dataclass(frozen=True, slots=True)
class VerdictState:
    """The pruner's answer to a report."""

    proceed: bool
    reason: str


@dataclass(slots=True)
class GenerationState:
    """One generation: the trials with one comparability key.

    Attributes:
        number: From 1.
        name: Name of its Optuna mirror.
        comparability: What its trials are compared by.
        began_at_s: Unix seconds.
        first: Number of its first trial.
        session: Index of the session in which it began.
        reasons: Why the generation before it ended.
        reused: Numbers of earlier trials that samplers and pruners still learn from.
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
    """Everything the ledger says about one trial.

    Attributes:
        fold_reports: Report indices reserved for each fold.
        generation: Number of its generation.
        own: The study file's values when the trial was made; empty where they are the present ones.
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
        """Failures of its attempts, oldest first."""
        failures: list[PastFailure] = []
        farthest = -1
        for attempt in self.attempts:
            # An attempt that got no further than one before it has made no progress.
            further = attempt.checkpoint_step is not None and attempt.checkpoint_step > farthest
            farthest = max(farthest, attempt.checkpoint_step if attempt.checkpoint_step is not None else -1)
            if attempt.failure is not None:
                failures.append(PastFailure(attempt.failure.kind, further, attempt.failure.action, attempt.device))
        return tuple(failures)

    @property
    def made_progress(self) -> bool:
        """Whether the last attempt reached a later checkpoint than all before it."""
        *earlier, last = [attempt.checkpoint_step for attempt in self.attempts]
        return last is not None and all(step is None or step < last for step in earlier)

    @property
    def point_is_to_blame(self) -> bool:
        """Whether it failed because of its parameters, so that they would fail again."""
        failures = [attempt.failure for attempt in self.attempts if attempt.failure is not None]
        if self.outcome is not Outcome.FAILED or not failures:
            return False
        diagnosed = [failure for failure in failures[:-1] if failure.action is Action.DIAGNOSE]
        return any(PERMITTED[failure.kind].blames_point for failure in (failures[-1], *diagnosed))

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its value for each goal, the metric's first; None unless it completed with a value."""
        return None if self.value is None else (self.value, *self.also)

    @property
    def spreads(self) -> tuple[float, ...]:
        """Standard deviation over its folds for each goal; empty unless it completed with folds."""
        return () if self.value is None else fold_spreads(self.folds)

    def record(self) -> TrialRecord:
        """Return the trial as samplers and pruners see it.

        A trial that failed because of its parameters counts as refused: samplers learn nothing from failed trials.
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
    """One session: the work of one control process on the study.

    Attributes:
        set_aside: Devices that are not used any more, each with the reason.
        side_by_side: How many trials may run at the same time, as determined last; None: as asked for.
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
