"""The points of a space that take least memory: where none of them fits a device, no trial of the space does.

Of some keys it is known which values take less memory than others; the values of all the other keys that decide memory
are combined. No trial with such a combination takes less than the one with the smallest values of the known keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dryfit.core.settings.memory_key import FEWER_IS_LESS, IRRELEVANT, MORE_IS_LESS, NEUTRAL, SET_OR_UNSET
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.enqueued import Point
from dryfit.search.space.params import Param, enumerated, is_one_of
from dryfit.search.space.space import Space, first_value

_MOST_POINTS = 64
_UNSORTED = FEWER_IS_LESS | MORE_IS_LESS | NEUTRAL.keys()


@dataclass(frozen=True, slots=True)
class SmallestPoints:
    """The points of a space that take least memory and are not refused yet.

    Attributes:
        names: The searched keys that decide memory, and those of their conditions.
        combined: Those of them whose values are all combined.
        points: What is left; each has the names that apply to it.
    """

    names: tuple[str, ...]
    combined: frozenset[str]
    points: tuple[Point, ...]

    @classmethod
    def of(cls, space: Space) -> "SmallestPoints | None":
        """Return the smallest points of a space; None where they are not known, or more than 64."""
        deciding = [name for name in space.names if name not in IRRELEVANT | SET_OR_UNSET]
        names = space.closure(deciding)
        asked = {key for name in names for param in space.cases(name) for key, _ in param.when}
        combined = frozenset(name for name in names if name in asked or name not in _UNSORTED)

        def values(param: Param) -> tuple[Scalar, ...] | None:
            return enumerated(param.distribution, _MOST_POINTS) if param.name in combined else (_smallest(param),)

        points = space.variants(names, values)
        if points is None or len(points) > _MOST_POINTS:
            return None
        return cls(tuple(names), combined, tuple(points))

    def without(self, refused: Mapping[str, Scalar]) -> "SmallestPoints":
        """Return what is left once a trial with these parameters was refused: what takes no less than it goes too."""
        left = tuple(point for point in self.points if not self._takes_no_less(point, refused))
        return SmallestPoints(self.names, self.combined, left)

    def _takes_no_less(self, point: Point, refused: Mapping[str, Scalar]) -> bool:
        for name in self.names:
            if (name in point) != (name in refused):
                return False
            if name in point and not _is_at_most(name, refused[name], point[name], equal=name in self.combined):
                return False
        return True


def _smallest(param: Param) -> Scalar:
    """Return the value of a key that takes least memory."""
    if param.name in NEUTRAL:
        neutral = NEUTRAL[param.name]
        return neutral if param.contains(neutral) else first_value(param)
    return min(param.ends(), default=first_value(param), key=lambda value: _size(param.name, value))


def _is_at_most(name: str, value: Scalar, other: Scalar, *, equal: bool) -> bool:
    """Whether a value of a key takes no more memory than another one."""
    if is_one_of(value, (other,)):
        return True
    if equal:
        return False
    if name in NEUTRAL:
        return value == NEUTRAL[name] or other != NEUTRAL[name]
    return (
        isinstance(value, int | float) and isinstance(other, int | float) and _size(name, value) <= _size(name, other)
    )


def _size(name: str, value: float) -> float:
    return -value if name in MORE_IS_LESS else value
