"""Trials judged by several values at once: which of them no other trial beats."""

import math
from collections.abc import Sequence

from dryfit.core.settings.choices import Direction

Losses = tuple[float, ...]
"""The values of one trial, turned so that smaller is better in each of them."""


def as_losses(values: Sequence[float], directions: Sequence[Direction]) -> Losses | None:
    """Turn values so that smaller is better; None where one is NaN: such a trial can be compared with no other."""
    if any(math.isnan(value) for value in values):
        return None
    return tuple(
        -value if direction is Direction.MAXIMIZE else value
        for value, direction in zip(values, directions, strict=True)
    )


def dominates(one: Losses, other: Losses) -> bool:
    """Whether ``one`` is nowhere worse and somewhere better. Equal values do not dominate each other."""
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
