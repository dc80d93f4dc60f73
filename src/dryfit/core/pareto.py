"""Pareto dominance of trials with several goals."""

import math
from collections.abc import Sequence
from itertools import compress
from typing import Generic, TypeVar

from dryfit.core.settings.choices import Direction

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
