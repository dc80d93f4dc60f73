"""Over how many ranks a trial's model is cut where ``execution.tp`` is "auto": pure decisions."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

AUTO: Final = "auto"
DEGREES: Final = (2, 4, 8)
"""How many ranks are looked at, the fewest first."""


class RankOutcome(StrEnum):
    """What was found of a trial on so many ranks."""

    FITS = "fits"
    TOO_LARGE = "too_large"
    """It does not fit, whatever is changed that leaves the experiment as it is."""
    NOT_POSSIBLE = "not_possible"
    """It cannot be cut so, or nobody can say what it takes."""


def degrees_within(most: int) -> tuple[int, ...]:
    """The degrees that may be taken where there are ``most`` devices, or cores for so many processes."""
    return tuple(degree for degree in DEGREES if degree <= most)


def next_ranks(found: Mapping[int, RankOutcome], degrees: Sequence[int]) -> int | None:
    """On how many ranks a trial is to be looked at next; None: enough is known.

    Args:
        found: What is known, by the number of ranks; 1 is the whole model on one device.
        degrees: The numbers that may be taken, over 1.
    """
    if 1 not in found:
        return 1
    if found[1] is not RankOutcome.TOO_LARGE or RankOutcome.FITS in found.values():
        return None
    return next((degree for degree in sorted(degrees) if degree not in found), None)


def ranks_taken(found: Mapping[int, RankOutcome]) -> int | None:
    """The fewest ranks with which a trial fits; None: with none that was looked at."""
    return min((ranks for ranks, one in found.items() if one is RankOutcome.FITS), default=None)
