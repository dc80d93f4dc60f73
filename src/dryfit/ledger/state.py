"""The state of a study as its ledger has it, and the trials as samplers and pruners see them."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite, isnan
from typing import Final, Protocol, TypeAlias, TypeVar, cast, overload

from dryfit.ledger.events import (
    ComparabilityKey,
    FailureFacts,
    NodeJoined,
    NodeLost,
    Observed,
    ParallelSet,
    SessionOpened,
    VerdictGiven,
)
from dryfit.settings.devices import HERE, cpu_of, on_cpu
from dryfit.settings.errors import PERMITTED, Action, FailureKind, InternalError, PastFailure
from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.trial import FoldScore, MetricPoint, Outcome, Scalar, TrialRecord, fold_spreads
from dryfit.settings.wire import VALIDATING

# The states of a study's attempts, plans, trials, generations and sessions, as its ledger has them.


@dataclass(slots=True)
class NodeState:
    """A machine of a study beside that of the control process.

    Attributes:
        joined: Its agent, and what it has.
        losses: How many times it was given up.
        lost: Why it was given up last; empty: it is there, as long as its session lasts.
    """

    joined: NodeJoined
    losses: int = 0
    lost: str = ""


@dataclass(slots=True)
class SessionState:
    """One session: the work of one control process on the study.

    Attributes:
        last_at_s: When its last event so far was written, in Unix seconds.
        set_aside: Devices that are not used any more, each with the reason.
        nodes: The machines that have joined in it, by name.
        side_by_side: How many trials may run at the same time, as determined last; None: as asked for.
        side_by_side_reason: Why not more.
        superseded: Whether a later session was opened; if this one was not closed, it was killed.
    """

    opened: SessionOpened
    last_at_s: float
    closed: str | None = None
    set_aside: dict[str, str] = field(default_factory=dict[str, str])
    nodes: dict[str, NodeState] = field(default_factory=dict[str, NodeState])
    side_by_side: int | None = None
    side_by_side_reason: str = ""
    superseded: bool = False

    def take(self, event: NodeJoined | NodeLost | ParallelSet) -> None:
        """Take in what happened to the machines of the session, or to the number of trials side by side."""
        match event:
            case NodeJoined():
                before = self.nodes.get(event.node)
                self.nodes[event.node] = NodeState(event, before.losses if before is not None else 0)
            case NodeLost() if event.node in self.nodes:
                lost = self.nodes[event.node]
                lost.losses, lost.lost = lost.losses + 1, event.why
            case NodeLost():
                pass
            case ParallelSet():
                self.side_by_side, self.side_by_side_reason = event.parallel, event.reason

    @property
    def is_open(self) -> bool:
        """Whether its control process works on the study, as far as the ledger says."""
        return self.closed is None and not self.superseded

    @property
    def opened_at_s(self) -> float:
        """When it was opened, in Unix seconds."""
        return self.opened.at

    @property
    def work_s(self) -> float:
        """Seconds from its first event to its last one."""
        return self.last_at_s - self.opened.at


Fingerprint: TypeAlias = tuple[FailureKind, str, str]
"""Kind, exception class and origin of a failure: trials with one fingerprint failed in the same way."""

_OWN_MESSAGES = frozenset({FailureKind.CONFIG, FailureKind.DATA})
"""Kinds whose errors dryfit raises: one place in the code raises different ones, so the message counts too."""


def fingerprint(facts: FailureFacts) -> Fingerprint:
    """Return the key that equal failures share."""
    place = facts.place or facts.sentence
    if facts.kind in _OWN_MESSAGES:
        place = f"{place}: {facts.error.partition(chr(10))[0]}"
    return facts.kind, facts.error_type, place


@dataclass(slots=True)
class FailureTally:
    """Failed trials since the last complete or pruned one; those killed from outside are left out.

    Attributes:
        in_a_row: Their number.
        alike: Their number by fingerprint.
    """

    in_a_row: int = 0
    alike: Counter[Fingerprint] = field(default_factory=Counter[Fingerprint])

    def failed(self, facts: FailureFacts | None) -> None:
        """Count a failed trial.

        Args:
            facts: The failure of its last attempt; None if it had none.
        """
        if facts is None:
            self.in_a_row += 1
        elif PERMITTED[facts.kind].trips:
            self.in_a_row += 1
            self.alike[fingerprint(facts)] += 1


class AttemptEnd(StrEnum):
    """How a process of a trial ended."""

    RESULT = "result"
    FAILED = "failed"
    LOST = "lost"
    """It was lost with its control process, and no later session has examined it yet."""
    RUNNING = "running"


_ENDS_THE_TRIAL: Final = frozenset({Action.GIVE_UP, Action.UNPLANNED})


@dataclass(slots=True)
class AttemptState:
    """One process of a trial. ``ended`` is False while it runs, or if the control process died with it.

    Attributes:
        trial: Number of its trial.
        session: The session that placed it, or a later one that goes on with it; None: none.
    """

    number: int
    placed_at_s: float
    place: str = cpu_of(HERE)
    needs_bytes: int | None = None
    terms: tuple[str, ...] = ()
    pid: int | None = None
    overhead_ms: float | None = None
    first_step_ms: float | None = None
    checkpoint_step: int | None = None
    checkpoint_at_s: float | None = None
    session: SessionState | None = None
    ended: bool = False
    ended_at_s: float | None = None
    failure: FailureFacts | None = None
    trial: int = field(kw_only=True)

    @property
    def end(self) -> AttemptEnd:
        """How it ended, or whether it runs according to the ledger: its session is open."""
        if self.failure is not None:
            return AttemptEnd.FAILED
        if self.ended:
            return AttemptEnd.RESULT
        return AttemptEnd.RUNNING if self.session is not None and self.session.is_open else AttemptEnd.LOST

    @property
    def end_s(self) -> float:
        """When it ended, in Unix seconds, as far as is known now.

        That is no later than the end of its session: the end of an attempt lost with its control process is only noted
        by the next session, perhaps a night later.
        """
        last_s = self.session.last_at_s if self.session is not None else None
        ends = [at_s for at_s in (self.ended_at_s, last_s) if at_s is not None]
        return max(self.placed_at_s, min(ends, default=self.placed_at_s))

    @property
    def time_s(self) -> float:
        """How long its process worked."""
        return self.end_s - self.placed_at_s

    @property
    def lost_s(self) -> float:
        """How much of its work was lost, in seconds.

        That is 0 for an attempt that runs, left a result or was pruned. If the trial goes on, it is the time since the
        last checkpoint; if the attempt ended its trial, all of its time.
        """
        action = self.failure.action if self.failure is not None else None
        if self.end in (AttemptEnd.RUNNING, AttemptEnd.RESULT) or action is Action.PRUNE:
            return 0.0
        goes_on = action not in _ENDS_THE_TRIAL
        kept_until_s = self.checkpoint_at_s if goes_on and self.checkpoint_at_s is not None else self.placed_at_s
        return max(0.0, self.end_s - kept_until_s)

    @property
    def device(self) -> str | None:
        """The device, or devices, that it has; None: it runs on a CPU."""
        return None if on_cpu(self.place) else self.place


@dataclass(slots=True)
class PlanState:
    """The plan of a trial.

    Attributes:
        key: See :class:`~dryfit.ledger.events.TrialPlanned`.
        fallbacks_taken: How many of its fallbacks were taken, each after an attempt ran out of device memory.
        eval_batches_taken: How many of its smaller validation batches were taken, each after a validation did.
        misses: How many attempts ran out of device memory although they were planned.
    """

    key: str
    answer: PlanAnswer
    fallbacks_taken: int = 0
    eval_batches_taken: int = 0
    misses: int = 0

    @property
    def fallbacks_left(self) -> int:
        """Number of fallbacks that have not been tried."""
        return len(self.answer.fallbacks) - self.fallbacks_taken

    @property
    def eval_batches_left(self) -> int:
        """Number of smaller validation batches that have not been tried."""
        return len(self.answer.eval_batches) - self.eval_batches_taken

    def left_after(self, phase: str) -> int:
        """Return how many times it can still be run otherwise after it ran out of device memory.

        Args:
            phase: What it was doing: see :class:`~dryfit.settings.wire.Phase`.
        """
        return self.fallbacks_left + (self.eval_batches_left if phase == VALIDATING else 0)

    def take_fallback(self, phase: str) -> None:
        """Take a smaller validation batch where a validation ran out of memory, as long as there is one.

        Args:
            phase: As :meth:`left_after`.
        """
        if phase == VALIDATING and self.eval_batches_left > 0:
            self.eval_batches_taken += 1
        else:
            self.fallbacks_taken += 1

    @property
    def execution(self) -> ExecutionChoice | None:
        """How the next attempt is to be executed; None: as the study file says."""
        choice = self.answer.fallbacks[self.fallbacks_taken - 1] if self.fallbacks_taken else self.answer.execution
        if choice is None or not self.eval_batches_taken:
            return choice
        return choice.with_eval_rows_at_most(self.answer.eval_batches[self.eval_batches_taken - 1])

    @property
    def changes_what_was_asked(self) -> bool:
        """Whether the next attempt is executed otherwise than was asked for."""
        return self.answer.verdict is VerdictKind.FITS_WITH or self.fallbacks_taken > 0

    @property
    def runs_otherwise(self) -> bool:
        """Whether the trial runs with another execution than the one whose memory was planned."""
        return self.fallbacks_taken > 0 or self.eval_batches_taken > 0 or self.answer.execution is None

    @property
    def kind(self) -> DeviceSpec | None:
        """The kind of GPU that it is for; None: the CPU."""
        return None if self.on_cpu else self.answer.device

    @property
    def on_cpu(self) -> bool:
        """Whether it is a plan for the CPU: its memory is that of processes, not of tensors on a device."""
        return self.answer.device.kind is DeviceKind.CPU

    @property
    def peak_bytes(self) -> int | None:
        """The planned peak: allocated memory on a GPU, on the CPU that of all processes; None if it is unknown."""
        memory = self.answer.memory
        if memory is None or not self.on_cpu:
            return memory.peak_allocated_bytes if memory is not None else None
        return self.answer.devices * (memory.required_bytes - memory.margin_bytes)


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
        plan: The plan that its last attempt was run by, or the last that was made since; None: it has none.
        plans: All its plans, by key: where devices are of several kinds it has one for each.
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
    verdicts: dict[int, VerdictGiven] = field(default_factory=dict[int, VerdictGiven])
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    attempts: list[AttemptState] = field(default_factory=list[AttemptState])
    plan: PlanState | None = None
    plans: dict[str, PlanState] = field(default_factory=dict[str, PlanState])
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

    @property
    def score(self) -> float | None:
        """The value of a complete trial; None unless it is finite."""
        known = self.outcome is Outcome.COMPLETE and self.value is not None and isfinite(self.value)
        return self.value if known else None

    @property
    def best_step(self) -> int | None:
        """Optimizer steps done at its best report; None where it has none, or folds."""
        return next((point.step for point in self.reports if point.n == self.best), None)

    @property
    def collapsed(self) -> str:
        """In words how it gave all rows the same answer, at its best validation or in every fold; empty: it did not."""
        if self.folds:
            return self.folds[0].collapsed if all(fold.collapsed for fold in self.folds) else ""
        return next((point.collapsed for point in self.reports if point.n == self.best), "")

    @property
    def is_collapsed(self) -> bool:
        """Whether it gave all rows the same answer."""
        return bool(self.collapsed)

    @property
    def last_value(self) -> float | None:
        """The value of the last report; None without reports."""
        return self.reports[-1].value if self.reports else None

    @property
    def steps_done(self) -> int:
        """Optimizer steps at its end, or at the last report."""
        return self.steps or (self.reports[-1].step if self.reports else 0)

    @property
    def time_s(self) -> float:
        """How long its processes worked."""
        return sum(attempt.time_s for attempt in self.attempts)

    @property
    def lost_s(self) -> float:
        """How much of that work was lost; see :attr:`AttemptState.lost_s`."""
        return sum(attempt.lost_s for attempt in self.attempts)

    @property
    def observed_bytes(self) -> int | None:
        """The observed peak: allocated memory on a GPU, resident memory of its processes on the CPU."""
        if self.observed is None:
            return None
        by_process = self.observed.allocated_bytes is None or (self.plan is not None and self.plan.on_cpu)
        return self.observed.rss_bytes if by_process else self.observed.allocated_bytes

    @property
    def planned_bytes(self) -> int | None:
        """The planned peak; None if it is unknown, or what was observed is of another execution."""
        if self.plan is None or (self.observed is not None and self.plan.runs_otherwise):
            return None
        return self.plan.peak_bytes

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
            is_collapsed=self.is_collapsed,
            excess=self.plan.answer.excess if self.plan else None,
        )


# The trials of a study as samplers and pruners see them, with projections of the ended ones.
#
# A sampler's or pruner's decision is a function of the trials alone. To keep its cost constant as trials accumulate,
# each keeps a :class:`Projection` here, to which every ended trial is applied once. A projection can be dropped: the
# next question makes it again.


class Projection(Protocol):
    """A summary of all ended trials; it must not depend on the order in which they ended."""

    def apply(self, record: TrialRecord) -> None:
        """Add a trial that ended."""
        ...


ProjectionT = TypeVar("ProjectionT", bound=Projection)


class History(Sequence[TrialRecord]):
    """All trials, by number.

    Args:
        records: Those so far, in any order.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._records: list[TrialRecord] = []
        self._places: dict[int, int] = {}
        self._open: dict[int, TrialRecord] = {}
        self._ended: list[TrialRecord] = []
        self._projections: dict[Hashable, tuple[Projection, int]] = {}
        for record in sorted(records, key=lambda record: record.number):
            self.put(record)

    @property
    def running(self) -> list[TrialRecord]:
        """Trials without an end, by number."""
        return list(self._open.values())

    def put(self, record: TrialRecord) -> None:
        """Add a new trial, or replace one that had not ended.

        Raises:
            InternalError: The trial had ended already, or its number is smaller than the last one's.
        """
        number = record.number
        place = self._places.get(number)
        if place is None:
            if self._records and number < self._records[-1].number:
                raise InternalError("keeping the history", f"trial {number} after {self._records[-1].number}")
            self._places[number] = len(self._records)
            self._records.append(record)
        elif number in self._open:
            self._records[place] = record
        else:
            raise InternalError("keeping the history", f"trial {number} has ended before")
        if record.outcome is None:
            self._open[number] = record
        else:
            self._open.pop(number, None)
            self._ended.append(record)

    def get(self, number: int) -> TrialRecord | None:
        """Return a trial; None where there is none of this number."""
        place = self._places.get(number)
        return None if place is None else self._records[place]

    def before(self, number: int) -> "History":
        """Return the trials with smaller numbers: this history itself if it has no others."""
        if not self._records or self._records[-1].number < number:
            return self
        return History(record for record in self._records if record.number < number)

    def projected(self, key: Hashable, make: Callable[[], ProjectionT]) -> ProjectionT:
        """Return the projection of all ended trials, up to date.

        Args:
            key: Identifies it among the projections.
            make: Makes an empty one, the first time.
        """
        projection, applied = self._projections.get(key) or (make(), 0)
        for record in self._ended[applied:]:
            projection.apply(record)
        self._projections[key] = projection, len(self._ended)
        return cast("ProjectionT", projection)

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self._records)

    def __iter__(self) -> Iterator[TrialRecord]:
        """Iterate over them by number."""
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> TrialRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrialRecord]: ...
    def __getitem__(self, index: int | slice) -> TrialRecord | list[TrialRecord]:
        """Return a trial by its index, which is its number where none is missing."""
        return self._records[index]


def as_history(records: Iterable[TrialRecord]) -> History:
    """Return trials as a history: the same object where they are one already."""
    return records if isinstance(records, History) else History(records)


class Ranking:
    """Complete trials by the study's metric, as :func:`~dryfit.settings.trial.best_first` orders them.

    Args:
        sign: -1 where larger values are better, else 1.
        first: Trials with smaller numbers are left out: reused ones of earlier generations.
    """

    def __init__(self, sign: float, first: int = 0) -> None:
        self._sign = sign
        self._first = first
        self._ranked: list[tuple[bool, float, int]] = []

    def apply(self, record: TrialRecord) -> None:
        """Add a trial that ended."""
        if (
            record.number >= self._first
            and record.outcome is Outcome.COMPLETE
            and record.value is not None
            and not isnan(record.value)
        ):
            insort(self._ranked, (record.is_collapsed, self._sign * record.value, record.number))

    def numbers(self, most: int) -> list[int]:
        """Return the numbers of the best ``most`` trials."""
        return [number for _, _, number in self._ranked[:most]]
