"""The largest number that fits, where memory grows with it: what is known, and which number is tried next. Pure.

A peak is the greatest of several amounts that grow with the rows, so that memory is convex in them: between two known
numbers it lies below their chord, outside above it. What must fit so is tried next, what cannot is not tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CERTAIN = 1.02
"""Fragmentation moves what is needed by less."""


class Tried(NamedTuple):
    """Whether a training fits, and what it needs; None: unknown."""

    fits: bool
    required_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known of the numbers.

    Attributes:
        low: The largest that fits; 0: none does.
        high: The smallest other one; None: there is none.
        points: Required bytes by number, as far as they are known.
        capacity_bytes: What the device has.
    """

    low: int
    high: int | None
    points: Mapping[int, int]
    capacity_bytes: int

    @classmethod
    def of(cls, tried: Mapping[int, Tried], capacity_bytes: int, also: Mapping[int, int] | None = None) -> "Bracket":
        """Return what was found by trying, with points that are known besides."""
        points = {number: one.required_bytes for number, one in tried.items() if one.required_bytes is not None}
        low = max((number for number, one in tried.items() if one.fits), default=0)
        high = min((number for number, one in tried.items() if not one.fits), default=None)
        return cls(low, high, {**points, **(also or {})}, capacity_bytes)

    def next_of(self, numbers: Sequence[int]) -> int | None:
        """Return which of some numbers to try next, in order of falling numbers; None: the largest that fits is known.

        The smallest comes first: what does not fit there fits nowhere.
        """
        if not self.low:
            return numbers[-1] if numbers and self.high is None else None
        left = numbers[:-1]
        while left:
            number = next(filter(self._must_fit, left), left[len(left) // 2])
            if number <= self.low:
                left = left[: left.index(number)]
            elif (self.high is not None and number >= self.high) or self._cannot_fit(number):
                left = left[left.index(number) + 1 :]
            else:
                return number
        return None

    def crossing(self, first: int, second: int) -> int | None:
        """Return the last number on the line through two points that the device has room for; None: all or none."""
        slope = self._slope(first, second)
        return math.floor(first + (self.capacity_bytes - self.points[first]) / slope) if slope else None

    def _must_fit(self, number: int) -> bool:
        """Whether the chord between the known points around it says so."""
        below = max((known for known in self.points if known < number), default=None)
        above = min((known for known in self.points if known > number), default=None)
        return below is not None and above is not None and self._on_line(below, above, number) <= self.capacity_bytes

    def _cannot_fit(self, number: int) -> bool:
        """Whether the line through the two known points before it says so."""
        below = sorted(known for known in self.points if known < number)[-2:]
        return len(below) == 2 and self._on_line(below[0], below[1], number) > CERTAIN * self.capacity_bytes

    def _on_line(self, first: int, second: int, number: int) -> float:
        return self.points[first] + self._slope(first, second) * (number - first)

    def _slope(self, first: int, second: int) -> float:
        return (self.points[second] - self.points[first]) / (second - first)
