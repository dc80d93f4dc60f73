"""What is learned, and what is known of a trial."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import Field

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.tables import DataSettings, Settings, TrialSettings
from dryfit.core.settings.task_facts import MetricName, TaskName

Scalar: TypeAlias = bool | int | float | str | None
"""A value of the search space: what TOML and JSON can both hold."""


class Goal(Settings):
    """One of the values that a study optimises."""

    name: str
    direction: Direction


class TrialConfig(Settings):
    """Everything that changes a trial's result. Two trials with one fingerprint compute the same thing.

    Attributes:
        number: The trial's number in its study, from 0.
        settings: The resolved tables, searched values included.
        params: The searched values by public dotted name, a part of ``settings`` repeated for reading.
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
        """Hash of all that changes the result; the number is no part of it.

        It has absolute paths and every key in it, so another place or a later version computes another one. What
        identifies a trial is what this was when the trial was asked for: the ledger has it.
        """
        # A key that came later and is not set changes nothing: trials of before go on.
        later = {"folds"} if self.data.folds == 1 else set[str]()
        text = self.model_dump_json(exclude={"number": True, "params": True, "data": later})
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        fold: Which of its trial's trainings it is of, from 1; 0: the trial trains once. With folds, ``n`` and ``step``
            count over all of them, and ``value`` is what the trial has come to; ``metrics`` are this validation's own.
    """

    n: int
    step: int
    epoch: float
    value: float
    metrics: dict[str, float]
    fold: int = 0


@dataclass(frozen=True, slots=True)
class FoldScore:
    """What a trial has come to on one fold, which it was validated on after training on the others.

    Attributes:
        value: The metric at its best validation.
        also: Values of the study's further goals there, in their order.
        best_step: Optimizer steps of this fold behind the best validation.
        steps: Optimizer steps done.
        schedule_steps: Optimizer steps of the whole schedule; more than were done where it stopped early.
    """

    value: float
    also: tuple[float, ...]
    best_step: int
    steps: int
    schedule_steps: int

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "FoldScore":
        """Read what :func:`dataclasses.asdict` and JSON have made of one."""
        facts: dict[str, Any] = {**said, "also": tuple(said["also"])}
        return cls(**facts)

    @property
    def values(self) -> tuple[float, ...]:
        """Its values of all goals, the study's metric first."""
        return (self.value, *self.also)

    @property
    def stopped_early(self) -> bool:
        """Whether a part of the schedule was not needed."""
        return self.steps < self.schedule_steps


def fold_means(folds: Sequence[FoldScore]) -> tuple[float, ...]:
    """The mean over the folds, of each goal; at least one fold."""
    return tuple(mean(values) for values in zip(*(fold.values for fold in folds), strict=True))


def fold_spreads(folds: Sequence[FoldScore]) -> tuple[float, ...]:
    """The sample standard deviation over the folds, of each goal; empty of fewer than two folds."""
    if len(folds) < 2:
        return ()
    return tuple(_deviation(values) for values in zip(*(fold.values for fold in folds), strict=True))


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers, of which any may be infinite or NaN."""
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Around the sample's own mean, so divided by one less than there are values; NaN where one is infinite."""
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What history knows of one trial: all that samplers and pruners may read.

    Attributes:
        params: Searched values by *internal* name (one per distribution).
        distributions: Optuna's JSON of the distribution of each internal name.
        outcome: None while the trial runs.
        value: The trial's value, None unless it completed.
        reports: Its validations in order.
        system_attrs: What a pruner must remember (ASHA's rungs).
        also: Its values of the study's further goals, in their order; empty unless it completed.
        enqueued: The enqueued point it was made from, by public name; empty where there was none.
        own: The study file's own values by public name, where today's may differ: what it had where it drew none.
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

    @property
    def values(self) -> tuple[float, ...] | None:
        """Its values of all goals, the study's metric first; None unless it completed with a value."""
        return None if self.value is None else (self.value, *self.also)


def better(value: float, than: float, direction: Direction) -> bool:
    """Whether ``value`` is strictly better; NaN never is, and anything but NaN is better than NaN."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value > than if direction is Direction.MAXIMIZE else value < than


class Valued(Protocol):
    """A trial as far as ranking goes."""

    @property
    def number(self) -> int:
        """Of the trial in its study."""
        ...

    @property
    def value(self) -> float | None:
        """Its value of the study's metric."""
        ...


ValuedT = TypeVar("ValuedT", bound=Valued)


def best_first(trials: Iterable[ValuedT], direction: Direction) -> list[ValuedT]:
    """The trials that have a value, the best first and the earliest of equals; NaN is none."""
    sign = -1.0 if direction is Direction.MAXIMIZE else 1.0
    keyed = [
        ((sign * trial.value, trial.number), trial)
        for trial in trials
        if trial.value is not None and not math.isnan(trial.value)
    ]
    return [trial for _, trial in sorted(keyed, key=itemgetter(0))]


def best_point(points: tuple[MetricPoint, ...], direction: Direction) -> MetricPoint | None:
    """The best of several validations, the earliest of equals; None where all are NaN or there is none."""
    best: MetricPoint | None = None
    for point in points:
        if better(point.value, best.value if best else float("nan"), direction):
            best = point
    return best


def best_value(points: tuple[MetricPoint, ...], direction: Direction) -> float:
    """The value of the best of several validations; NaN where there is none."""
    best = best_point(points, direction)
    return math.nan if best is None else best.value
