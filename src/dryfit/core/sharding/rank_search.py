"""Choice of the number of tensor-parallel ranks where ``execution.tp`` is "auto"."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

AUTO: Final = "auto"
DEGREES: Final = (2, 4, 8)
"""Numbers of ranks that are tried, the fewest first."""


class RankOutcome(StrEnum):
    """Whether a trial fits on some number of ranks."""

    FITS = "fits"
    TOO_LARGE = "too_large"
    """It does not fit, even with all changes that keep the experiment."""
    NOT_POSSIBLE = "not_possible"
    """The model cannot be sharded so, or its memory is unknown."""


def degrees_within(most: int) -> tuple[int, ...]:
    """Return the degrees possible with ``most`` devices, or with cores for so many processes."""
    return tuple(degree for degree in DEGREES if degree <= most)


def next_ranks(outcomes: Mapping[int, RankOutcome], degrees: Sequence[int]) -> int | None:
    """Return the number of ranks to try next; None: enough is known.

    Args:
        outcomes: The outcomes so far by number of ranks; 1 is the whole model on one device.
        degrees: The allowed numbers over 1.
    """
    if 1 not in outcomes:
        return 1
    if outcomes[1] is not RankOutcome.TOO_LARGE or RankOutcome.FITS in outcomes.values():
        return None
    return next((degree for degree in sorted(degrees) if degree not in outcomes), None)


def ranks_taken(outcomes: Mapping[int, RankOutcome]) -> int | None:
    """Return the fewest ranks on which a trial fits; None if it fits on none that was tried."""
    return min((ranks for ranks, outcome in outcomes.items() if outcome is RankOutcome.FITS), default=None)
