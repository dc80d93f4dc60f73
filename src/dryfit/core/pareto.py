"""Pareto dominance of trials with several goals."""

import math
from collections.abc import Sequence

from dryfit.core.settings.choices import Direction

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
