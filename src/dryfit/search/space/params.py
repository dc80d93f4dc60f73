"""Searched parameters: their distributions and the conditions under which they are drawn."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

from dryfit.core.settings.trial import Scalar

Distribution: TypeAlias = CategoricalDistribution | FloatDistribution | IntDistribution
"""The three kinds a searched key may have. Optuna does not freeze them; nobody here changes one."""

When: TypeAlias = tuple[tuple[str, tuple[Scalar, ...]], ...]
"""A condition, sorted by key: each public key must have one of its values."""

_GRID_TOLERANCE = 1e-8
"""How far a value may lie from its grid point, as a share of a step; Optuna allows the same."""


@dataclass(frozen=True, slots=True)
class Param:
    """One case of one searched key: one static distribution under one internal name.

    Attributes:
        name: Public dotted name.
        internal: Name of the distribution: the public one, or ``name#k`` for case ``k`` of several.
        when: Applies only where all of these hold; empty: always.
    """

    name: str
    internal: str
    distribution: Distribution
    when: When = ()

    def applies(self, drawn: Mapping[str, Scalar]) -> bool:
        """Whether the values drawn so far, by public name, meet the condition."""
        return all(key in drawn and is_one_of(drawn[key], values) for key, values in self.when)

    def contains(self, value: Scalar) -> bool:
        """Whether the value may be drawn."""
        return contains(self.distribution, value)

    def ends(self) -> list[float]:
        """Return numbers among which the smallest and the largest are that may be drawn; none where there are none."""
        limits = self.distribution
        values = limits.choices if isinstance(limits, CategoricalDistribution) else (limits.low, limits.high)
        return [value for value in values if isinstance(value, int | float)]


def public_name(internal: str) -> str:
    """Return the public name of an internal one."""
    return internal.partition("#")[0]


def is_one_of(value: Scalar, values: tuple[Scalar, ...]) -> bool:
    """Whether a value equals one of some as TOML means it: true is not 1, but 1 is 1.0."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def contains(distribution: Distribution, value: Scalar) -> bool:
    """Whether a value can be drawn from a distribution."""
    if isinstance(distribution, CategoricalDistribution):
        return is_one_of(value, tuple(distribution.choices))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not distribution.low <= value <= distribution.high:
        return False
    if isinstance(distribution, IntDistribution):
        return isinstance(value, int) and (value - distribution.low) % distribution.step == 0
    if distribution.step is None:
        return True
    steps = (value - distribution.low) / distribution.step
    return abs(steps - round(steps)) < _GRID_TOLERANCE


def only_value(distribution: Distribution) -> Scalar:
    """Return the value of a distribution that has a single one."""
    return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low


def into_range(distribution: Distribution, value: Scalar) -> Scalar:
    """Undo rounding: sums of steps and exponentials of logarithms may pass a bound by one unit in the last place."""
    if isinstance(distribution, FloatDistribution) and isinstance(value, int | float):
        return min(max(float(value), distribution.low), distribution.high)
    return value


def enumerated(distribution: Distribution, limit: int) -> tuple[Scalar, ...] | None:
    """Return all values of a distribution; None where it is continuous or has more than ``limit``."""
    if isinstance(distribution, CategoricalDistribution):
        values = tuple(distribution.choices)
    elif isinstance(distribution, IntDistribution):
        values = range(distribution.low, distribution.high + 1, distribution.step)
    elif distribution.low == distribution.high:
        values = (distribution.low,)
    else:
        return None
    return tuple(values) if len(values) <= limit else None


def to_text(distribution: Distribution) -> str:
    """Return Optuna's JSON of a distribution."""
    return distribution_to_json(distribution)


def from_text(text: str) -> Distribution:
    """Parse a distribution from Optuna's JSON.

    Raises:
        ValueError: The text is no distribution, or of a kind no space has.
    """
    distribution = json_to_distribution(text)
    if not isinstance(distribution, Distribution):
        raise ValueError(f"not a distribution of a search space: {text}")
    return distribution


def describe(distribution: Distribution) -> str:
    """Describe a distribution in the words of a study file."""
    if isinstance(distribution, CategoricalDistribution):
        return json.dumps(list(distribution.choices))
    log = ", log" if distribution.log else ""
    stepped = distribution.step not in (None, 1)
    step = f", step {distribution.step:g}" if stepped else ""
    return f"{distribution.low:g} to {distribution.high:g}{log}{step}"


def describe_when(when: When) -> str:
    """Describe a condition."""
    parts = [f"{key} = {' or '.join(json.dumps(value) for value in values)}" for key, values in when]
    return " and ".join(parts) or "always"


def when_from_json(value: Mapping[str, object]) -> When:
    """Return a condition from its JSON object."""
    return tuple(sorted((key, tuple(cast("list[Scalar]", values))) for key, values in value.items()))
