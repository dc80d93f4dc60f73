"""Enqueued points: the study file's own values and those of ``[[search.enqueue]]``, checked against the space."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from optuna.distributions import CategoricalDistribution, FloatDistribution

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError
from dryfit.core.settings.trial import Scalar, TrialRecord
from dryfit.core.wire import canonical_json
from dryfit.search.space.fields import setting, suggestion
from dryfit.search.space.params import Param, describe, describe_when, is_one_of
from dryfit.search.space.space import Space

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
