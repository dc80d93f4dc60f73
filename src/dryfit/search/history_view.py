"""Projections of the ended trials that keep only those which samplers read; with several goals, by Pareto fronts."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import isfinite, isnan
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dryfit.settings.choices import Direction
from dryfit.settings.trial import Outcome, TrialRecord

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def non_dominated(losses: Floats) -> Indices:
    """Return the indices of the rows that no other row dominates (the Pareto front), in order; equal rows all belong.

    In lexicographic order the first row is dominated by none: one pass over the rest for each row of the front.
    With two columns one pass is enough: a row is dominated where a different one before it has no larger second value.
    """
    if losses.shape[1] == 2:
        return _non_dominated_pairs(losses)
    front: list[Indices] = []
    left = np.lexsort(losses.T[::-1])
    while left.size:
        first, rest = losses[left[0]], losses[left]
        not_better = (rest >= first).all(axis=1)
        front.append(left[(rest == first).all(axis=1)])
        left = left[~not_better]
    return np.sort(np.concatenate(front)) if front else left


def _non_dominated_pairs(losses: Floats) -> Indices:
    order = np.lexsort(losses.T[::-1])
    rows = losses[order]
    differs = np.ones(len(rows), dtype=bool)
    differs[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    second = rows[differs, 1]
    stays = np.ones(len(second), dtype=bool)
    stays[1:] = second[1:] < np.minimum.accumulate(second)[:-1]
    return np.sort(order[stays[np.cumsum(differs) - 1]])


def crowding_distances(losses: Floats) -> Floats:
    """Return each row's crowding distance: the sum over the goals of the gap between its two neighbours.

    The ends of each goal are infinitely far. Of equal rows only the first has a distance: a copy would take the place
    of another end. Source: Deb et al., "A fast and elitist multiobjective genetic algorithm: NSGA-II", 2002.
    """
    distances = np.zeros(len(losses))
    _, firsts = np.unique(losses, axis=0, return_index=True)
    firsts.sort()
    for column in losses[firsts].T:
        order = np.argsort(column, kind="stable")
        sorted_values = column[order]
        distances[firsts[order[[0, -1]]]] = np.inf
        width = sorted_values[-1] - sorted_values[0]
        if width > 0:
            distances[firsts[order[1:-1]]] += (sorted_values[2:] - sorted_values[:-2]) / width
    return distances


def best_spread(losses: Floats, count: int) -> Indices:
    """Return the indices of the ``count`` best rows, in order: front after front, the last one by crowding distance.

    Of rows with equal distances the earlier is taken.
    """
    left = np.arange(len(losses))
    chosen: list[Indices] = []
    wanted = count
    while left.size and wanted > 0:
        at = non_dominated(losses[left])
        best = left[at]
        if best.size > wanted:
            sparsest_first = np.argsort(-crowding_distances(losses[best]), kind="stable")
            best = best[sparsest_first[:wanted]]
        chosen.append(best)
        wanted -= best.size
        left = np.delete(left, at)
    return np.sort(np.concatenate(chosen)) if chosen else left[:0]


def is_visible(record: TrialRecord, goals: int, *, refused: bool) -> bool:
    """Whether a sampler sees a trial.

    Failed and cancelled trials are hidden: TPE would ignore the first, and the second say nothing. So are complete
    trials without a value, or with NaN.

    Args:
        record: A trial.
        goals: How many values are optimised.
        refused: Whether refused trials are visible.
    """
    match record.outcome:
        case Outcome.COMPLETE:
            if goals == 1:
                return record.value is not None and not isnan(record.value)
            values = record.values or ()
            return len(values) == goals and all(isfinite(value) for value in values)  # no volume is infinite
        case Outcome.PRUNED:
            return True
        case Outcome.REFUSED:
            return refused
        case Outcome.FAILED | Outcome.CANCELLED | None:
            return False


def _number(record: TrialRecord) -> int:
    return record.number


class Window:
    """The best of the visible trials, and the last ones; the others are forgotten.

    With several goals the best are those of the first Pareto fronts; of a front that is too large, those with the
    largest crowding distances.

    Args:
        directions: Whether each goal is maximised or minimised.
        refused: Whether refused trials are visible.
        best: How many of the best.
        last: How many of the last.
    """

    def __init__(self, directions: Sequence[Direction], *, refused: bool, best: int, last: int) -> None:
        self.count = 0
        """How many trials were visible in all."""
        self._goals = len(directions)
        self._refused = refused
        self._most = best + last
        self._last_most = last
        self._last: list[TrialRecord] = []
        self._best = _BestOfOne(directions[0], best) if len(directions) == 1 else _BestOfSeveral(directions, best)

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended."""
        if not is_visible(record, self._goals, refused=self._refused):
            return
        self.count += 1
        insort(self._last, record, key=_number)
        del self._last[: -self._most]
        if record.outcome is Outcome.COMPLETE:
            self._best.apply(record)

    def records(self) -> list[TrialRecord]:
        """Return the trials that are kept, by number: all, while they are not too many."""
        if self.count <= self._most:
            return list(self._last)
        read = [*self._best.records(), *self._last[-self._last_most :]]
        return sorted({record.number: record for record in read}.values(), key=_number)


class _BestOfOne:
    """The best trials by one value; of equals the earlier are the better ones."""

    def __init__(self, direction: Direction, most: int) -> None:
        self._sign = -1.0 if direction is Direction.MAXIMIZE else 1.0
        self._most = most
        self._best: list[tuple[float, int, TrialRecord]] = []

    def apply(self, record: TrialRecord) -> None:
        assert record.value is not None  # else it is not visible
        insort(self._best, (self._sign * record.value, record.number, record))
        del self._best[self._most :]

    def records(self) -> list[TrialRecord]:
        return [record for _, _, record in self._best]


class _BestOfSeveral:
    """The best trials by several values.

    A trial that is dominated by as many others as are kept is never among the best again, whatever follows: all of them
    are in earlier fronts than its own, and than those of the trials that it dominates itself. So it is forgotten at
    once, and the trials left have the same best ones as all trials (checked by a property test).
    """

    def __init__(self, directions: Sequence[Direction], most: int) -> None:
        self._signs = np.array([-1.0 if direction is Direction.MAXIMIZE else 1.0 for direction in directions])
        self._most = most
        self._records: list[TrialRecord] = []
        self._losses: Floats = np.empty((0, len(directions)))
        self._beaten = np.empty(0, dtype=np.int64)

    def apply(self, record: TrialRecord) -> None:
        losses = np.array(record.values) * self._signs
        differs = (self._losses != losses).any(axis=1)
        beaten_by = int(((self._losses <= losses).all(axis=1) & differs).sum())
        if beaten_by >= self._most:
            return
        self._beaten += (self._losses >= losses).all(axis=1) & differs
        place = bisect_left(self._records, record.number, key=_number)
        self._records.insert(place, record)
        self._losses = np.insert(self._losses, place, losses, axis=0)
        self._beaten = np.insert(self._beaten, place, beaten_by)
        stay = self._beaten < self._most
        if not stay.all():
            self._records = [kept for kept, stays in zip(self._records, stay, strict=True) if stays]
            self._losses, self._beaten = self._losses[stay], self._beaten[stay]

    def records(self) -> list[TrialRecord]:
        chosen: list[int] = best_spread(self._losses, self._most).tolist()
        return [self._records[index] for index in chosen]


Left = TypeVar("Left")
"""What a generation leaves to the next one."""


class Generations(Generic[Left]):
    """A projection of the ended trials: the parents that the full generations of counted trials have left.

    Args:
        size: Trials of a generation.
        counts: Whether a trial counts.
        follow: Takes a full generation, by number, and what the one before it has left; None: it is the first.
    """

    def __init__(
        self,
        size: int,
        counts: Callable[[TrialRecord], bool],
        follow: Callable[[Sequence[TrialRecord], Left | None], Left],
    ) -> None:
        self._size = size
        self._counts = counts
        self._follow = follow
        self._counted: list[TrialRecord] = []
        self._left: list[Left] = []

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended, which changes the generations from its place on."""
        if not self._counts(record):
            return
        place = bisect_left(self._counted, record.number, key=_number)
        self._counted.insert(place, record)
        del self._left[place // self._size :]

    def latest(self) -> Left | None:
        """Return what the last full generation has left; None before the first is full."""
        for start in range(len(self._left) * self._size, len(self._counted) - self._size + 1, self._size):
            generation = self._counted[start : start + self._size]
            self._left.append(self._follow(generation, self._left[-1] if self._left else None))
        return self._left[-1] if self._left else None
