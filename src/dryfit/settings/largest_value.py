"""The largest value of an argument with which a command fits: which value is rehearsed next, and what was found. Pure.

A value is bracketed between one that fits and one that does not, by the line through known points where there are
two. The line finds it at once where memory is linear; each third value is the middle, so that nothing takes long.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from dryfit.settings.bracket import CERTAIN, Bracket, Tried
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.older_python import StrEnum

_MOST_VALUES: Final = 40
_MOST_GROWTH: Final = 8
_THIRD: Final = 3


class ValueEnd(StrEnum):
    """What a rehearsal with a value told."""

    FITS = "fits"
    SHORT = "does not fit"
    UNKNOWN = "unknown"
    """The script failed by itself, mostly: no statement about memory."""


@dataclass(frozen=True, slots=True)
class TriedValue:
    """A rehearsed value.

    Attributes:
        allocated_bytes: The peak; None: unknown.
        reason: Why it is unknown.
    """

    value: int
    end: ValueEnd
    required_bytes: int | None = None
    allocated_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LargestValue:
    """What was found of an argument on a device.

    Attributes:
        name: The argument, its dashes included.
        largest: The largest that is known to fit; None: not even 1.
        following: The next value, which does not fit, or of which it is unknown; None: memory grows no more.
        bytes_per_unit: What each unit costs, from the smallest value that was rehearsed to the largest; None: unknown.
        tried: All that were rehearsed, in order of their values.
    """

    name: str
    device: DeviceSpec
    largest: TriedValue | None
    following: TriedValue | None
    bytes_per_unit: int | None
    tried: tuple[TriedValue, ...]

    @property
    def is_known(self) -> bool:
        """Whether some value fits, and it is known that the next one does not."""
        return self.largest is not None and (self.following is None or self.following.end is ValueEnd.SHORT)


def next_value(name: str, own: int, tried: Mapping[int, TriedValue], capacity_bytes: int) -> int | None:
    """Return the value to rehearse next; None: what there is to know is known.

    Raises:
        ConfigError: The script ignores the argument, or its memory does not grow with it.
    """
    if own not in tried:
        return own
    bracket = _bracket(tried, capacity_bytes)
    low, high = bracket.low, bracket.high
    _demand_monotone(name, tried, bracket)
    if len(tried) >= _MOST_VALUES or (low and low + 1 == high) or high == 1 or (high is None and _is_flat(tried)):
        return None
    known = sorted(bracket.points)
    if high is None:
        if len(known) < 2:
            return max(2 * own, low + 1)
        crossing = bracket.crossing(*known[-2:])  # None: the same, in whole segments of the allocator
        return _MOST_GROWTH * low if crossing is None else min(max(crossing, low + 1), _MOST_GROWTH * low)
    ends = (low, high) if low else tuple(known[:2])
    is_known = len(ends) == 2 and set(ends) <= set(known)
    crossing = bracket.crossing(*ends) if is_known and len(tried) % _THIRD else None
    return max((low + high) // 2, 1) if crossing is None else min(max(crossing, low + 1), high - 1)


def found(name: str, device: DeviceSpec, tried: Mapping[int, TriedValue]) -> LargestValue:
    """Return what the tried values say."""
    bracket = _bracket(tried, device.capacity_bytes)
    ordered = tuple(tried[value] for value in sorted(tried))
    known = [one for one in ordered if one.required_bytes is not None]
    first, last = (known[0], known[-1]) if known else (tried[min(tried)],) * 2
    more_bytes = (last.required_bytes or 0) - (first.required_bytes or 0)
    unit = None if last.value == first.value else more_bytes // (last.value - first.value)
    following = None if bracket.high is None else tried[bracket.high]
    return LargestValue(name, device, tried.get(bracket.low), following, unit, ordered)


def _bracket(tried: Mapping[int, TriedValue], capacity_bytes: int) -> Bracket:
    known = {value: Tried(one.end is ValueEnd.FITS, one.required_bytes) for value, one in tried.items()}
    return Bracket.of(known, capacity_bytes)


def _is_flat(tried: Mapping[int, TriedValue]) -> bool:
    """Whether the two largest values take the same."""
    ends = [tried[value] for value in sorted(tried)[-2:]]
    return len(ends) == 2 and ends[0].allocated_bytes == ends[1].allocated_bytes


def _demand_monotone(name: str, tried: Mapping[int, TriedValue], bracket: Bracket) -> None:
    doing = f"looking for the largest {name}"
    known = [tried[value] for value in sorted(tried) if tried[value].allocated_bytes is not None]
    if len(known) > 1 and len({(one.allocated_bytes, one.required_bytes) for one in known}) == 1:
        found = f"the script takes the same memory with {known[0].value} and {known[-1].value}: it ignores {name}"
        raise ConfigError(doing, found, "an argument that its memory depends on")
    low, high = bracket.low, bracket.high
    shrinks = [
        (one, other)
        for one, other in combinations(known, 2)
        if (one.required_bytes or 0) > CERTAIN * (other.required_bytes or 0)
    ]
    if shrinks or (high is not None and low > high):
        first, second = (shrinks[0][0].value, shrinks[0][1].value) if shrinks else (high, low)
        found = f"{second} takes less than {first}" if shrinks else f"{first} does not fit or fails, and {second} fits"
        raise ConfigError(doing, found, "an argument with which memory grows")
