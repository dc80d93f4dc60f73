"""Points that a study tries first, and the points that take least memory."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optuna.distributions import CategoricalDistribution, FloatDistribution

from dryfit.search.space import (
    Param,
    Space,
    describe,
    describe_when,
    enumerated,
    first_value,
    is_one_of,
    setting,
    suggestion,
)
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_key import FEWER_IS_LESS, IRRELEVANT, MORE_IS_LESS, NEUTRAL, SET_OR_UNSET
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.trial import Scalar, TrialRecord
from dryfit.settings.wire import canonical_json

# Enqueued points: the study file's own values and those of ``[[search.enqueue]]``, checked against the space.


Point = Mapping[str, Scalar]
"""Values of some or all searched keys, by public dotted name."""


def enqueued_points(space: Space, config: StudyConfig, number: int) -> tuple[Point, ...]:
    """Return the points to try before the sampler is asked: for trial 0 the file's values, then the enqueued ones.

    Raises:
        ConfigError: An enqueued value is not searched, outside its range, or its condition is not met.
    """
    enqueued = tuple(_checked(space, point, index) for index, point in enumerate(config.search.enqueue))
    if number > 0 or not config.search.defaults_first or config.function is not None:
        return enqueued  # a user's function has no known defaults
    settings = config.trial_settings
    return ({name: setting(settings, name) for name in space.names}, *enqueued)


def next_enqueued(points: Sequence[Point], past: Iterable[TrialRecord]) -> Point:
    """Return the first point that no trial was made from yet; an empty one where none is left.

    The ledger says which point each trial was made from. So points that are added to an existing study are its next
    trials, and points that are removed or reordered change nothing. A point that is given twice is tried twice.
    """
    if not points:
        return {}
    taken = Counter(canonical_json(record.enqueued) for record in past if record.enqueued)
    for point in points:
        text = canonical_json(dict(point))
        if taken[text] == 0:
            return point
        taken[text] -= 1
    return {}


def point_place(index: int, name: str) -> str:
    """Return the name of an enqueued value in messages, under which its place in the file is known too."""
    return f"search.enqueue.{index}.{name}"


def _checked(space: Space, point: Point, index: int) -> Point:
    """Return the point with its values as the space holds them."""
    for name in point:
        if name not in space.names:
            raise ConfigError(
                f"reading {point_place(index, name)}",
                f"{name} is not searched",
                "keys of [space]" if space.names else "keys of [space], and it is empty",
                suggestion(name, space.names) or f"add {name} to [space], or remove it here",
            )
    checked: dict[str, Scalar] = {}
    for name in (name for name in space.names if name in point):
        param = space.active(name, checked)
        if param is None:
            raise _unmet(space.cases(name), point_place(index, name))
        value = _held(param, point[name])
        if not param.contains(value):
            raise ConfigError(
                f"reading {point_place(index, name)}",
                f"{json.dumps(point[name])} lies outside the space",
                describe(param.distribution) + (f" when {describe_when(param.when)}" if param.when else ""),
                "another value, or a wider entry in [space]",
            )
        checked[name] = value
    return checked


def _unmet(cases: Sequence[Param], place: str) -> ConfigError:
    return ConfigError(
        f"reading {place}",
        "the values of this point do not meet its condition",
        " or ".join(describe_when(case.when) for case in cases),
        "give the keys of the condition in the same point, or leave this one out",
    )


def _held(param: Param, value: Scalar) -> Scalar:
    """Return the value as the distribution holds it: 1 as 1.0 in a float range, an equal choice as it is written."""
    distribution = param.distribution
    if isinstance(distribution, CategoricalDistribution):
        return next((choice for choice in distribution.choices if is_one_of(value, (choice,))), value)
    if isinstance(distribution, FloatDistribution) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


# The points of a space that take least memory: where none of them fits a device, no trial of the space does.
#
# Of some keys it is known which values take less memory than others; the values of all the other keys that decide
# memory are combined. No trial with such a combination takes less than the one with the smallest values of the known
# keys.


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
