"""What a study of a Trainer optimises: metrics of its evaluations, and which of them is the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dryfit.core.errors import ObjectiveError
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.objective_table import CalledCode
from dryfit.jobs.own.trainer_checkpoints import Evaluation

_PREFIX: Final = "eval_"
_OF_THE_CLOCK: Final = ("runtime", "per_second", "preparation_time", "alloc_delta")
"""Ends of names of numbers that say how long an evaluation took."""


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation, without those of the clock and the epoch."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name != "epoch" and not name.endswith(_OF_THE_CLOCK)
    }


@dataclass(frozen=True, slots=True)
class Goals:
    """The metrics of a study, the first of which decides.

    Attributes:
        names: As the study file has them; the Trainer's ``eval_`` before a name may be missing.
        minimized: Whether smaller values of the first are better.
    """

    names: tuple[str, ...]
    minimized: bool

    @classmethod
    def of(cls, objective: CalledCode) -> "Goals":
        """Return the goals of a request."""
        first = (objective.directions or (Direction.MINIMIZE,))[0]
        return cls(objective.goals, first is Direction.MINIMIZE)

    def first(self, numbers: Mapping[str, float]) -> float | None:
        """Return the value that decides; None: this evaluation has none."""
        return _value(numbers, self.names[0])

    def is_better(self, value: float, evaluations: Sequence[Evaluation]) -> bool:
        """Whether a value is better than those of all evaluations; NaN never is."""
        best = self.best(evaluations)
        before = self.first(best.metrics) if best is not None else None
        if math.isnan(value):
            return False
        return before is None or (value < before if self.minimized else value > before)

    def best(self, evaluations: Sequence[Evaluation]) -> Evaluation | None:
        """Return the best evaluation, of equal ones the first; None: none has a number that can be compared."""
        valued = [(self.first(each.metrics), each) for each in evaluations]
        comparable = [(value, each) for value, each in valued if value is not None and not math.isnan(value)]
        sign = 1.0 if self.minimized else -1.0
        return min(comparable, key=lambda pair: sign * pair[0])[1] if comparable else None

    def values(self, evaluations: Sequence[Evaluation]) -> tuple[float, ...]:
        """Return the value of each goal at the best evaluation; NaN where no evaluation has a number."""
        best = self.best(evaluations)
        if best is None:
            return (math.nan,) * len(self.names)
        return tuple(self._demanded(best.metrics, name) for name in self.names)

    def demand(self, evaluation: Evaluation) -> None:
        """Check that an evaluation has every metric of the study.

        Raises:
            ObjectiveError: One is missing; the error names those that are there.
        """
        for name in self.names:
            self._demanded(evaluation.metrics, name)

    def _demanded(self, numbers: Mapping[str, float], name: str) -> float:
        value = _value(numbers, name)
        if value is None:
            raise ObjectiveError(
                f"looking for the metric {name} in the Trainer's evaluation",
                f"it is not there; there are {', '.join(numbers) or 'no numbers at all'}",
                "a number that the Trainer evaluates",
                f"name one of these, or return {name.removeprefix(_PREFIX)!r} from compute_metrics",
            )
        return value


def _value(numbers: Mapping[str, float], name: str) -> float | None:
    return numbers.get(name, numbers.get(_PREFIX + name))
