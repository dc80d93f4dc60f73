"""Trials: configuration, outcome, validations, scores and order."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, Field

from dryfit.settings.choices import Direction
from dryfit.settings.tables import DataSettings, Settings, TrialSettings
from dryfit.settings.task_facts import MetricName, TaskName

# Pareto dominance of trials with several goals.


T = TypeVar("T")

Losses = tuple[float, ...]
"""The values of one trial, with signs such that smaller is better."""


def as_losses(values: Sequence[float], directions: Sequence[Direction]) -> Losses | None:
    """Return values with signs such that smaller is better; None if one is NaN: such a trial cannot be compared."""
    if any(math.isnan(value) for value in values):
        return None
    return tuple(
        -value if direction is Direction.MAXIMIZE else value
        for value, direction in zip(values, directions, strict=True)
    )


def dominates(losses: Losses, other: Losses) -> bool:
    """Whether ``losses`` are nowhere larger and somewhere smaller. Equal values do not dominate each other."""
    return losses != other and all(mine <= theirs for mine, theirs in zip(losses, other, strict=True))


class ParetoFront(Generic[T]):
    """The members that no other one dominates.

    Attributes:
        members: In the order in which they joined.
    """

    def __init__(self) -> None:
        self.members: list[T] = []
        self._losses: list[Losses] = []

    def join(self, member: T, losses: Losses) -> bool:
        """Add a member if it belongs there; return whether it improved the front.

        Members with equal losses are all in the front, but only the first of them improves it.
        """
        before = self._losses
        if any(dominates(theirs, losses) for theirs in before):
            return False
        stay = [not dominates(losses, theirs) for theirs in before]
        self.members = [*compress(self.members, stay), member]
        self._losses = [*compress(before, stay), losses]
        return losses not in before


Scalar: TypeAlias = bool | int | float | str | None
"""A value in the search space: one that both TOML and JSON can hold."""


class Goal(Settings):
    """A metric that a study optimises, with its direction."""

    name: str
    direction: Direction


class TrialConfig(Settings):
    """Everything that decides a trial's result. Trials with equal fingerprints compute the same.

    Attributes:
        number: The trial's number in its study, from 0.
        settings: The resolved tables, with the searched values.
        params: The searched values by public dotted name; ``settings`` has them too.
        also: Further metrics the study optimises; ``metric`` alone decides which validation is the best.
        seed: Seed of initialisation, dropout and batch order.
        data_fingerprint: Hash of the prepared rows.
    """

    number: int = Field(ge=0)
    task: TaskName
    metric: MetricName
    direction: Direction
    also: tuple[MetricName, ...] = ()
    data: DataSettings
    settings: TrialSettings
    params: dict[str, Scalar]
    seed: int = Field(ge=0)
    data_fingerprint: str = ""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the result; the number is not part of it.

        It depends on absolute paths and on all keys, so it changes with the folder and the version. A trial is
        identified by its fingerprint at creation, which the ledger has.
        """
        # A newer key that is not set must not change the fingerprints of older trials.
        lora = _at_default(self.settings.lora, "double_quant", "compute")
        train = _at_default(self.settings.train, "early_stopping_min_delta")
        data = _at_default(self.data, "folds") | {"labels"}  # whatever the classes are called, the same is learned
        later: dict[str, Any] = {"data": data, "settings": {"lora": lora, "train": train}}
        text = self.model_dump_json(exclude={"number": True, "params": True, **later})
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _at_default(table: BaseModel, *keys: str) -> set[str]:
    """Return those keys of a table that have their default."""
    return {key for key in keys if getattr(table, key) == type(table).model_fields[key].default}


class Outcome(StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"

    @property
    def counts(self) -> bool:
        """Whether the trial counts towards the study's total."""
        return self in (Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED)


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One validation of one trial.

    Attributes:
        n: Index of the report, from 0.
        step: Optimizer steps done.
        epoch: Passes over the data done; fractional within one.
        value: The study's metric. May be NaN.
        metrics: Every metric computed, the study's included.
        fold: The fold, from 1; 0: the trial has none. With folds, ``n`` and ``step`` count over all of them, and
            ``value`` is the trial's value so far; ``metrics`` are those of this validation.
        collapsed: In words how the answers are the same for all rows; empty: they are not, or nobody looked.
    """

    n: int
    step: int
    epoch: float
    value: float
    metrics: dict[str, float]
    fold: int = 0
    collapsed: str = ""


@dataclass(frozen=True, slots=True)
class FoldScore:
    """A trial's scores on one fold, on which it was validated after training on the others.

    Attributes:
        value: The metric at its best validation.
        also: Values of the further goals there, in order.
        best_step: Optimizer steps of this fold up to the best validation.
        steps: Optimizer steps done.
        schedule_steps: Optimizer steps of the whole schedule; more than ``steps`` if it stopped early.
        collapsed: As of :class:`MetricPoint`, at its best validation.
    """

    value: float
    also: tuple[float, ...]
    best_step: int
    steps: int
    schedule_steps: int
    collapsed: str = ""

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "FoldScore":
        """Rebuild a score from the JSON of its :func:`dataclasses.asdict`."""
        facts: dict[str, Any] = {**said, "also": tuple(said["also"])}
        return cls(**facts)

    @property
    def values(self) -> tuple[float, ...]:
        """Its value for each goal, the study's metric first."""
        return (self.value, *self.also)

    @property
    def stopped_early(self) -> bool:
        """Whether training stopped before the end of the schedule."""
        return self.steps < self.schedule_steps


def fold_means(folds: Sequence[FoldScore]) -> tuple[float, ...]:
    """Return the mean over at least one fold, for each goal."""
    return tuple(mean(values) for values in zip(*(fold.values for fold in folds), strict=True))


def fold_spreads(folds: Sequence[FoldScore]) -> tuple[float, ...]:
    """Return the sample standard deviation over the folds, for each goal; empty for fewer than two folds."""
    if len(folds) < 2:
        return ()
    return tuple(_deviation(values) for values in zip(*(fold.values for fold in folds), strict=True))


def mean(values: Sequence[float]) -> float:
    """Return the mean of numbers, any of which may be infinite or NaN."""
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; NaN if a value is infinite."""
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as samplers and pruners see it.

    Attributes:
        params: Searched values by *internal* name (one per distribution).
        distributions: Optuna's JSON of each internal name's distribution.
        outcome: None while the trial runs.
        value: The trial's value; None unless it completed.
        reports: Its validations in order.
        system_attrs: The pruner's memory of it (ASHA's rungs).
        also: Its values for the further goals, in order; empty unless it completed.
        enqueued: The enqueued point it was made from, by public name; empty: none.
        own: The study file's values at its creation, by public name, if the present ones may differ.
        is_collapsed: Whether it gave all rows the same answer: it is ranked behind those that did not.
        excess: The share of its device by which its planned memory exceeds it; None: it has no plan.
    """

    number: int
    params: dict[str, Scalar]
    distributions: dict[str, str]
    outcome: Outcome | None = None
    value: float | None = None
    reports: tuple[MetricPoint, ...] = ()
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    also: tuple[float, ...] = ()
    enqueued: dict[str, Scalar] = field(default_factory=dict[str, Scalar])
    own: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    is_collapsed: bool = False
    excess: float | None = None

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its value for each goal, the study's metric first; None unless it completed with a value."""
        return None if self.value is None else (self.value, *self.also)


def better(value: float, than: float, direction: Direction) -> bool:
    """Whether ``value`` is strictly better; NaN never is, and anything but NaN is better than NaN."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value > than if direction is Direction.MAXIMIZE else value < than


class Valued(Protocol):
    """A trial that can be ranked."""

    @property
    def number(self) -> int:
        """The trial's number in its study."""
        ...

    @property
    def value(self) -> float | None:
        """Its value for the study's metric."""
        ...

    @property
    def is_collapsed(self) -> bool:
        """Whether it gave all rows the same answer."""
        ...


ValuedT = TypeVar("ValuedT", bound=Valued)


def best_first(trials: Iterable[ValuedT], direction: Direction) -> list[ValuedT]:
    """Return the trials that have a value other than NaN, the best first, the earlier of equals before the later.

    Those that gave all rows the same answer come last, whatever their values.
    """
    sign = -1.0 if direction is Direction.MAXIMIZE else 1.0
    keyed = [
        ((trial.is_collapsed, sign * trial.value, trial.number), trial)
        for trial in trials
        if trial.value is not None and not math.isnan(trial.value)
    ]
    return [trial for _, trial in sorted(keyed, key=itemgetter(0))]


def best_point(points: tuple[MetricPoint, ...], direction: Direction) -> MetricPoint | None:
    """Return the best validation, the earliest of equals; None if there is none with a value other than NaN."""
    best: MetricPoint | None = None
    for point in points:
        if better(point.value, best.value if best else float("nan"), direction):
            best = point
    return best


def best_value(points: tuple[MetricPoint, ...], direction: Direction) -> float:
    """Return the value of the best validation; NaN if there is none."""
    best = best_point(points, direction)
    return math.nan if best is None else best.value
