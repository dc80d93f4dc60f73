"""Check the ``[space]`` table and turn it into parameters.

Cases of one key must be disjoint. Conditions are conjunctions over the values of earlier keys, so it is decided exactly
whether two of them can hold together. Cases that can are refused, so their order never matters.
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import combinations

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dryfit.config.schema import Case, Cases
from dryfit.core.errors import ConfigError
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.fields import suggestion
from dryfit.search.space.keys import Keys
from dryfit.search.space.params import Distribution, Param, When, describe_when, is_one_of

_MOST_CHAINED = 64
"""Conditions in a row, each on a key that has one itself."""

_Wanted = Mapping[str, tuple[Scalar, ...]]


def declare(space: Mapping[str, Cases], keys: Keys) -> tuple[Param, ...]:
    """Check the searched keys and bring them into an order where conditions look back only.

    Args:
        space: The ``[space]`` table.
        keys: What may be searched.

    Raises:
        ConfigError: A key, value, range or condition is wrong, conditions go in a circle, or cases overlap.
    """
    params: dict[str, tuple[Param, ...]] = {}
    for key in _in_order(space, keys):
        cases = space[key]
        names = [key] if len(cases) == 1 else [f"{key}#{index}" for index in range(len(cases))]
        params[key] = tuple(
            Param(key, name, _distribution(key, case, keys), _when(key, case, params, keys))
            for name, case in zip(names, cases, strict=True)
        )
        _check_cases(params[key], params)
    return tuple(param for cases in params.values() for param in cases)


def _in_order(space: Mapping[str, Cases], keys: Keys) -> list[str]:
    """Keys in the file's order, except that a condition's keys come first."""
    ordered: list[str] = []

    def place(key: str, path: tuple[str, ...]) -> None:
        if key in path:
            circle = " -> ".join((*path[path.index(key) :], key))
            raise ConfigError(_doing(key), f"the conditions go in a circle: {circle}", "conditions that do not")
        if key in ordered:
            return
        if len(path) == _MOST_CHAINED:
            chain = " -> ".join((*path[:3], "..."))
            problem = f"the conditions go from key to key more than {_MOST_CHAINED} times: {chain}"
            raise ConfigError(_doing(path[0]), problem, f"at most {_MOST_CHAINED} conditions in a row")
        for parent in _parents(space[key]):
            if parent not in space:
                raise ConfigError(
                    _doing(key),
                    f"its condition asks for {parent}, which is not searched",
                    "conditions on other keys of [space]",
                    suggestion(parent, tuple(other for other in space if other != key)),
                )
            place(parent, (*path, key))
        ordered.append(key)

    for key in space:
        keys.require(key, _doing(key))
        place(key, ())
    return ordered


def _doing(key: str) -> str:
    return f"reading [space], {key}"


def _parents(cases: Cases) -> list[str]:
    return list(dict.fromkeys(parent for case in cases for parent in case.when or {}))


def _distribution(key: str, case: Case, keys: Keys) -> Distribution:
    doing = _doing(key)
    if case.choices is not None:
        choices = tuple(keys.as_set(key, choice, doing) for choice in case.choices)
        for index, choice in enumerate(choices):
            if is_one_of(choice, choices[:index]):
                raise ConfigError(doing, f"the choices repeat {json.dumps(choice)}", "each value once")
        return CategoricalDistribution(choices)
    assert case.low is not None and case.high is not None  # Case has checked that it is one or the other
    kind = keys.number_type(key, (case.low, case.high) if case.step is None else (case.low, case.high, case.step))
    if kind is None:
        raise ConfigError(doing, "it has low and high, but holds no number", keys.legal(key), "give a list of choices")
    if kind is int:
        return _int_range(key, case, keys)
    low, high = float(case.low), float(case.high)
    keys.as_set(key, low, doing)
    keys.as_set(key, high, doing)
    _check_grid(key, case)
    return FloatDistribution(low, high, log=case.log, step=None if case.step is None else float(case.step))


def _int_range(key: str, case: Case, keys: Keys) -> IntDistribution:
    doing = _doing(key)
    low, high, step = case.low, case.high, 1 if case.step is None else case.step
    if not isinstance(low, int) or not isinstance(high, int) or not isinstance(step, int):
        found = f"low {low}, high {high}, step {step}: not all are integers"
        raise ConfigError(doing, found, keys.legal(key), "write 8, not 8.0")
    keys.as_set(key, low, doing)
    keys.as_set(key, high, doing)
    _check_grid(key, case)
    return IntDistribution(low, high, log=case.log, step=step)


def _check_grid(key: str, case: Case) -> None:
    """Refuse a ``high`` that is not on the grid: Optuna would lower it silently."""
    if case.step is None:
        return
    low, high, step = (Decimal(str(number)) for number in (case.low, case.high, case.step))
    if (high - low) % step:
        last = low + (high - low) // step * step
        raise ConfigError(
            _doing(key),
            f"high {case.high} is no whole number of steps of {case.step} above low {case.low}",
            f"high {last} or {last + step}",
        )


def _when(key: str, case: Case, earlier: Mapping[str, tuple[Param, ...]], keys: Keys) -> When:
    when: list[tuple[str, tuple[Scalar, ...]]] = []
    for parent, wanted in (case.when or {}).items():
        doing = f"{_doing(key)}, when {parent}"
        values = tuple(keys.as_set(parent, v, doing) for v in (wanted if isinstance(wanted, tuple) else (wanted,)))
        if not values:
            raise ConfigError(doing, "no value is given", "a value, or a list of values")
        for value in values:
            if not any(param.contains(value) for param in earlier[parent]):
                found = f"{parent} never has the value {json.dumps(value)}"
                raise ConfigError(doing, found, "values that its own entry in [space] can take")
        when.append((parent, values))
    return tuple(sorted(when, key=lambda item: item[0]))


def _check_cases(cases: Sequence[Param], known: Mapping[str, tuple[Param, ...]]) -> None:
    for case in cases:
        if not _possible(dict(case.when), known):
            raise ConfigError(
                _doing(case.name),
                f"its case for {describe_when(case.when)} can never apply",
                "conditions that can hold together",
            )
    for first, second in combinations(cases, 2):
        both = _merged(dict(first.when), second.when)
        if both is not None and _possible(both, known):
            raise ConfigError(
                _doing(first.name),
                f"two cases can apply at once: {describe_when(first.when)}; {describe_when(second.when)}",
                "cases that exclude each other",
                "give each case a `when` with values the others do not have",
            )


def _merged(wanted: _Wanted, when: When) -> dict[str, tuple[Scalar, ...]] | None:
    """Return both conditions as one; None where they ask for different values of a key."""
    merged = dict(wanted)
    for key, values in when:
        merged[key] = tuple(value for value in values if is_one_of(value, merged[key])) if key in merged else values
        if not merged[key]:
            return None
    return merged


def _possible(wanted: _Wanted, known: Mapping[str, tuple[Param, ...]]) -> bool:
    """Whether some drawing gives every key one of its wanted values.

    Removes the latest key, once for each of its cases that can give a wanted value, and adds that case's own condition
    instead. Conditions look back only, so a removed key never returns.
    """
    if not wanted:
        return True
    order = list(known)
    latest = max(wanted, key=order.index)
    rest = {key: values for key, values in wanted.items() if key != latest}
    for param in known[latest]:
        if any(param.contains(value) for value in wanted[latest]):
            merged = _merged(rest, param.when)
            if merged is not None and _possible(merged, known):
                return True
    return False
