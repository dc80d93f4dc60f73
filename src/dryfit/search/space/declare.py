"""Check the ``[space]`` table and turn it into parameters.

Cases of one key must be disjoint. Conditions are conjunctions over the values of earlier keys, so it is decided exactly
whether two of them can hold together. Cases that can are refused, so their order never matters.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dryfit.config.schema import Case, Cases
from dryfit.core.errors import ConfigError
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.fields import Keys, suggestion
from dryfit.search.space.params import Distribution, Param, When, describe_when, is_one_of

_MOST_CHAINED = 64
"""Conditions in a row, each on a key that has one itself."""

_MOST_TRIED = 100_000
"""Combinations that are tried to find out whether the conditions of a space can hold: some seconds."""

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
    possibilities = _Possibilities(params)
    for key in _in_order(space, keys):
        cases = space[key]
        names = [key] if len(cases) == 1 else [f"{key}#{index}" for index in range(len(cases))]
        params[key] = tuple(
            Param(key, name, _distribution(key, case, keys), _when(key, case, params, keys))
            for name, case in zip(names, cases, strict=True)
        )
        _check_cases(params[key], possibilities)
    return tuple(param for cases in params.values() for param in cases)


def _in_order(space: Mapping[str, Cases], keys: Keys) -> list[str]:
    """Keys in the file's order, except that a condition's keys come first."""
    ordered: dict[str, int] = {}  # with the number of conditions in a row that lead to a key

    def place(key: str, path: tuple[str, ...]) -> None:
        if key in path:
            circle = " -> ".join((*path[path.index(key) :], key))
            raise ConfigError(_doing(key), f"the conditions go in a circle: {circle}", "conditions that do not")
        if key in ordered:
            return
        if len(path) > _MOST_CHAINED:
            raise _too_long(path[0])
        for parent in _parents(space[key]):
            if parent not in space:
                raise ConfigError(
                    _doing(key),
                    f"its condition asks for {parent}, which is not searched",
                    "conditions on other keys of [space]",
                    suggestion(parent, tuple(other for other in space if other != key)),
                )
            place(parent, (*path, key))
        ordered[key] = max((ordered[parent] + 1 for parent in _parents(space[key])), default=0)
        if ordered[key] > _MOST_CHAINED:
            raise _too_long(key)

    for key in space:
        keys.require(key, _doing(key))
        place(key, ())
    return list(ordered)


def _too_long(key: str) -> ConfigError:
    problem = f"more than {_MOST_CHAINED} conditions lead to it, each on a key that has one itself"
    return ConfigError(_doing(key), problem, f"at most {_MOST_CHAINED} conditions in a row")


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


def _check_cases(cases: Sequence[Param], possibilities: "_Possibilities") -> None:
    for case in cases:
        if not possibilities.holds(dict(case.when), _doing(case.name)):
            raise ConfigError(
                _doing(case.name),
                f"its case for {describe_when(case.when)} can never apply",
                "conditions that can hold together",
            )
    for first, second in combinations(cases, 2):
        both = _merged(dict(first.when), second.when)
        if both is not None and possibilities.holds(both, _doing(first.name)):
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


class _Possibilities:
    """Whether some drawing of the keys so far can meet a condition.

    That is a question of satisfiability, so there is no useful bound of the time it takes but one that is set. Spaces
    whose conditions depend on a few keys are far from it.

    Args:
        known: Every key before the one that is checked, with its cases. It may grow: conditions look back only.
    """

    def __init__(self, known: Mapping[str, tuple[Param, ...]]) -> None:
        self._known = known
        self._rank: dict[str, int] = {}
        self._impossible: set[frozenset[tuple[str, str]]] = set()
        self._left = _MOST_TRIED

    def holds(self, wanted: _Wanted, doing: str) -> bool:
        """Return whether some drawing gives every key one of its wanted values.

        The latest key is removed, once for each of its cases that can give a wanted value, and that case's own
        condition is added instead, until nothing is wanted. Conditions look back only, so a removed key never returns.

        Raises:
            ConfigError: Too many combinations would have to be tried.
        """
        self._rank = {key: rank for rank, key in enumerate(self._known)}
        tried: set[frozenset[tuple[str, str]]] = set()
        left = [wanted]
        while left:
            here = left.pop()
            if not here:
                return True
            mark = frozenset((key, repr(values)) for key, values in here.items())
            if mark in tried or mark in self._impossible:
                continue
            tried.add(mark)
            self._left -= 1
            if self._left < 0:
                raise ConfigError(
                    doing,
                    f"whether its conditions can hold depends on more than {_MOST_TRIED} combinations of other keys",
                    "conditions on fewer keys that have conditions themselves",
                )
            left += self._before(here)
        self._impossible |= tried
        return False

    def _before(self, wanted: _Wanted) -> Iterator[_Wanted]:
        """Yield what is wanted of the earlier keys, for each way in which the latest one can get its value."""
        latest = max(wanted, key=self._rank.__getitem__)
        rest = {key: values for key, values in wanted.items() if key != latest}
        for param in self._known[latest]:
            if any(param.contains(value) for value in wanted[latest]):
                merged = _merged(rest, param.when)
                if merged is not None:
                    yield merged
