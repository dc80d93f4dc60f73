"""The search space: which settings may be searched, over which values, under which conditions."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)
from pydantic import ValidationError

from dryfit.settings.errors import ConfigError, LedgerError
from dryfit.settings.memory_key import FEWER_IS_LESS, IRRELEVANT, MORE_IS_LESS, NEUTRAL, SET_OR_UNSET
from dryfit.settings.study_file import Case, Cases, StudyConfig
from dryfit.settings.study_file_text import SEARCHABLE, legal_values, number_type
from dryfit.settings.tables import ModelSettings, TrialSettings
from dryfit.settings.task_facts import OWN_TABLE, facts_of, is_own_key
from dryfit.settings.trial import Scalar, TrialRecord
from dryfit.settings.wire import canonical_json

# Settings that may be searched: their types and legal ranges, and how values are put into them.


_NEVER_SEARCHED = {
    "data": "all trials must be scored on the same rows",
    "study": "it describes the study, not a trial",
    "space": "it is the search space itself",
    "search": "it describes the search, not a trial",
    "execution": "how a trial is run is planned, never searched: it changes memory and time, not what is learned",
    "runtime": "how trials are run is planned, never searched: it does not change what is learned",
}


def require_searchable(key: str, doing: str) -> None:
    """Refuse a key that no trial has.

    Raises:
        ConfigError: With the reason, or the nearest key that may be searched.
    """
    if key in SEARCHABLE or is_own_key(key):
        return
    table = key.partition(".")[0]
    if table in _NEVER_SEARCHED:
        raise ConfigError(
            doing,
            f"{key} cannot be searched: {_NEVER_SEARCHED[table]}",
            f"keys of the tables {', '.join(TrialSettings.model_fields)}",
            f"set {key} in the study file, or with --set",
        )
    raise ConfigError(
        doing,
        f"there is no key {key}",
        f"keys of the tables {', '.join(TrialSettings.model_fields)}, by dotted name",
        suggestion(key, SEARCHABLE),
    )


def suggestion(key: str, known: tuple[str, ...]) -> str:
    """Return ``did you mean ...?``, or nothing."""
    near = get_close_matches(key, known, n=1) or [name for name in known if name.rpartition(".")[2] == key]
    return f"did you mean {near[0]}?" if near else ""


def apply_params(
    base: TrialSettings, params: Mapping[str, Scalar], *, doing: str = "putting searched values into the settings"
) -> TrialSettings:
    """Put values, by public dotted name, into the tables of a trial.

    Raises:
        ConfigError: A key is unknown or a value illegal; the message has both and the legal range.
    """
    tables: dict[str, dict[str, Any]] = json.loads(base.model_dump_json())
    for key, value in params.items():
        require_searchable(key, doing)
        table, _, name = key.partition(".")
        tables[table][name] = value
    try:
        # From JSON: strict validation then still takes the text of an enum.
        return TrialSettings.model_validate_json(json.dumps(tables))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        found = f"{key} = {json.dumps(params.get(key, first['input']))}"
        raise ConfigError(doing, found, legal_values(key.split(".", 1))) from error


def setting(settings: TrialSettings, key: str) -> Scalar:
    """Return a field's value as TOML and JSON would write it (None where it is unset)."""
    table, _, name = key.partition(".")
    if table == OWN_TABLE:
        return settings.own.knobs.get(name)
    value = settings.value(key)
    return value.value if isinstance(value, Enum) else value


_FREE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,99}")


class Keys:
    """Keys of a user's own function: any value is legal."""

    def require(self, key: str, doing: str) -> None:
        """Refuse a name that cannot be searched; also with characters that number cases, here and in the mirror.

        Raises:
            ConfigError: With the reason, and what may be searched.
        """
        if not _FREE_NAME.fullmatch(key):
            raise ConfigError(
                doing,
                f"{key!r} is no name of a parameter",
                "a letter or _, then letters, digits and _ . / - (100 at most)",
            )

    def as_set(self, key: str, value: Scalar, doing: str) -> Scalar:
        """Return the value as a trial gets it.

        Raises:
            ConfigError: The value is illegal there.
        """
        return value

    def number_type(self, key: str, given: tuple[int | float, ...]) -> type[int] | type[float] | None:
        """Return whether a range holds integers, where all its numbers are written so, or floats.

        Args:
            key: The key.
            given: The range's ``low`` and ``high``, and ``step`` if there is one.

        Returns:
            None where the key holds no numbers.
        """
        return int if all(isinstance(number, int) for number in given) else float

    def legal(self, key: str) -> str:
        """Describe what a key accepts."""
        return "integers, or numbers with a decimal point"


class SettingsKeys(Keys):
    """The settings of a trial that trains a model.

    Args:
        base: The study file's own values.
    """

    def __init__(self, base: TrialSettings) -> None:
        self._base = base

    def require(self, key: str, doing: str) -> None:
        """See :class:`Keys`."""
        require_searchable(key, doing)

    def as_set(self, key: str, value: Scalar, doing: str) -> Scalar:
        """See :class:`Keys`: 1 as 1.0 where the field is a float."""
        return setting(apply_params(self._base, {key: value}, doing=doing), key)

    def number_type(self, key: str, given: tuple[int | float, ...]) -> type[int] | type[float] | None:
        """See :class:`Keys`; decided by the field where dryfit knows it, not by how the bounds are written."""
        return super().number_type(key, given) if is_own_key(key) else number_type(key.split(".", 1))

    def legal(self, key: str) -> str:
        """See :class:`Keys`."""
        return legal_values(key.split(".", 1))


def keys_of(config: StudyConfig) -> Keys:
    """Return the keys that a study may search."""
    return Keys() if facts_of(config.study.task).calls_function else SettingsKeys(config.trial_settings)


# Searched parameters: their distributions and the conditions under which they are drawn.


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


# Check the ``[space]`` table and turn it into parameters.
#
# Cases of one key must be disjoint. Conditions are conjunctions over the values of earlier keys, so it is decided
# exactly whether two of them can hold together. Cases that can are refused, so their order never matters.


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


# The search space of a study: a fixed list of parameters whose conditions refer to earlier ones.


_MOST_PAIRS = 64
_STRIDE: Final = "span.doc_stride"
_LENGTH: Final = "train.max_length"
_MOST_VALUES = 16
_MOST_BRANCHES = 4096
_Listed: TypeAlias = Callable[[Param], tuple[Scalar, ...] | None]
_NOTHING: Final[Mapping[str, Scalar]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Space:
    """All parameters, each after the keys its condition asks for.

    Attributes:
        params: One entry per case of a searched key.
        groups: The same parameters, those with one condition together: they are drawn together or not at all. In an
            order in which the keys of a group's condition are drawn before it.
    """

    params: tuple[Param, ...]
    groups: tuple[tuple[Param, ...], ...] = field(init=False, compare=False)
    _by_name: dict[str, tuple[Param, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        groups: dict[Any, list[Param]] = {}
        by_name: dict[str, list[Param]] = {}
        for param in self.params:
            groups.setdefault(param.when, []).append(param)
            by_name.setdefault(param.name, []).append(param)
        object.__setattr__(self, "groups", tuple(tuple(group) for group in groups.values()))
        object.__setattr__(self, "_by_name", {name: tuple(cases) for name, cases in by_name.items()})

    @classmethod
    def from_config(cls, config: StudyConfig) -> "Space":
        """Build the space that a study file declares.

        Raises:
            ConfigError: A searched key, one of its values or a condition is wrong; see
                :mod:`dryfit.search.space`.
        """
        return cls(declare(config.space, keys_of(config)))

    @classmethod
    def from_json(cls, text: str) -> "Space":
        """Parse a space from :meth:`to_json`, without a check against today's settings.

        Raises:
            LedgerError: The text is something else.
        """
        try:
            entries = cast("list[dict[str, Any]]", json.loads(text))
            return cls(
                tuple(
                    Param(
                        public_name(entry["internal"]),
                        entry["internal"],
                        from_text(entry["distribution"]),
                        when_from_json(entry["when"]),
                    )
                    for entry in entries
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError("reading the recorded search space", f"{text[:200]!r}: {error!r}") from error

    def to_json(self) -> str:
        """Return the space as canonical JSON."""
        return canonical_json(
            [
                {"internal": param.internal, "distribution": to_text(param.distribution), "when": dict(param.when)}
                for param in self.params
            ]
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Public names, in order."""
        return tuple(self._by_name)

    def cases(self, name: str) -> tuple[Param, ...]:
        """Return all cases of a public name; none where it is not searched."""
        return self._by_name.get(name, ())

    def active(self, name: str, drawn: Mapping[str, Scalar]) -> Param | None:
        """Return the case of a key that applies to the values drawn so far; at most one does."""
        return next((param for param in self.cases(name) if param.applies(drawn)), None)

    def with_values(self, changed: Callable[[Scalar], Scalar]) -> "Space":
        """Return the space with choices, and the values in conditions, replaced."""

        def of(param: Param) -> Param:
            distribution = param.distribution
            if isinstance(distribution, CategoricalDistribution):
                distribution = CategoricalDistribution([changed(choice) for choice in distribution.choices])
            when = tuple((key, tuple(map(changed, values))) for key, values in param.when)
            return Param(param.name, param.internal, distribution, when)

        return Space(tuple(of(param) for param in self.params))

    def read(self, internal: Mapping[str, Scalar], own: Mapping[str, Scalar] = _NOTHING) -> dict[str, Scalar]:
        """Return parameters of an earlier trial by today's internal names.

        Only values count, not what they were drawn from: a value that this space could draw is kept, also where choices
        were added, a range was moved or cases were renumbered. Any other is left out, with all that depends on it.

        Args:
            internal: What the trial drew.
            own: The study file's own values at that time, which the trial had for keys that it did not draw.
        """
        before = {**own, **{public_name(name): value for name, value in internal.items()}}
        drawn: dict[str, Scalar] = {}
        read: dict[str, Scalar] = {}
        for name in self._by_name:
            if name not in before:
                continue
            param = self.active(name, drawn)
            if param is not None and param.contains(before[name]):
                drawn[name] = read[param.internal] = before[name]
        return read

    def model_length_pairs(self, base: TrialSettings) -> list[tuple[ModelSettings, int]]:
        """Return every (model, max_length) that a trial of this space can have.

        Only the base's own pair where they cannot be listed (a continuous range) or are more than 64.
        """
        deciding = [name for name in self._by_name if name.startswith("model.") or name == _LENGTH]
        variants = self.variants(deciding, _listed)
        if variants is None or len(variants) > _MOST_PAIRS:
            return [(base.model, base.train.max_length)]
        settings = [apply_params(base, values) for values in variants]
        return [(variant.model, variant.train.max_length) for variant in settings]

    def as_prepared(self, base: TrialSettings) -> TrialSettings:
        """Return the settings that rows are prepared with before the first trial.

        Of several ``span.doc_stride`` the largest is taken that a trial with the smallest ``train.max_length`` has: it
        is refused if it leaves no text. Trials with another one prepare their rows themselves.
        """
        if _STRIDE not in self._by_name:
            return base
        pairs = self.combinations((_STRIDE, _LENGTH), _MOST_PAIRS)
        drawn = pairs if pairs is not None else self.combinations((_STRIDE,), _MOST_PAIRS) or []
        settings = [apply_params(base, one) for one in drawn]
        shortest = min((one.train.max_length for one in settings), default=0)
        strides = [one.span.doc_stride for one in settings if one.train.max_length == shortest]
        return apply_params(base, {_STRIDE: max(strides)}) if strides else base

    def combinations(self, names: Collection[str], most: int) -> list[dict[str, Scalar]] | None:
        """Return every combination of values that some searched keys can have; None where there are more than ``most``.

        A key whose condition is not met is left out of a combination. Of a key with more than 16 values, or a
        continuous range, only the two ends are taken.
        """
        variants = self.variants([name for name in self._by_name if name in names], _listed_or_ends)
        return None if variants is None or len(variants) > most else variants

    def most(self, name: str, otherwise: float) -> float:
        """Return the largest number that a key can have; ``otherwise`` is its value where it is not searched."""
        cases = self.cases(name)
        numbers = [float(value) for case in cases for value in case.ends()]
        always = any(not case.when for case in cases)
        return max(numbers if always else [*numbers, otherwise])

    def variants(self, deciding: list[str], listed: _Listed) -> list[dict[str, Scalar]] | None:
        """Return the different combinations of some keys, over all values that their conditions ask for.

        Args:
            deciding: The keys, in order.
            listed: Lists the values of a case of such a key; None where they cannot be listed.

        Returns:
            None where a key's values cannot be listed, or there are too many combinations.
        """
        branches: list[dict[str, Scalar]] = [{}]
        for name in self.closure(deciding):
            grown: list[dict[str, Scalar]] = []
            for drawn in branches:
                values = self._outcomes(name, drawn, listed if name in deciding else None)
                if values is None or len(grown) > _MOST_BRANCHES:
                    return None
                grown += [drawn if value is None else {**drawn, name: value} for value in values]
            branches = grown
        if len(branches) > _MOST_BRANCHES:
            return None
        chosen = [{name: value for name, value in drawn.items() if name in deciding} for drawn in branches]
        return list({canonical_json(values): values for values in chosen}.values())

    def closure(self, names: list[str]) -> list[str]:
        """Return the names and all keys of their conditions, in order."""
        needed = set(names)
        for param in reversed(self.params):
            if param.name in needed:
                needed.update(key for key, _ in param.when)
        return [name for name in self._by_name if name in needed]

    def _outcomes(self, name: str, drawn: Mapping[str, Scalar], listed: _Listed | None) -> tuple[Scalar, ...] | None:
        """Return the values that a key can get after ``drawn``; None if they cannot be listed.

        A None among them stands for no value, or one that does not matter.

        Args:
            name: The key.
            drawn: The values before it.
            listed: Lists the values of a key that is asked about; None for the others.
        """
        param = self.active(name, drawn)
        if param is None:
            return (None,)
        if listed is not None:
            return listed(param)
        values = enumerated(param.distribution, _MOST_PAIRS)
        if values is not None and isinstance(param.distribution, CategoricalDistribution):
            return values
        asked = dict.fromkeys(value for other in self.params for key, vs in other.when if key == name for value in vs)
        return (*(value for value in asked if param.contains(value)), None)


def _listed(param: Param) -> tuple[Scalar, ...] | None:
    return enumerated(param.distribution, _MOST_PAIRS)


def _listed_or_ends(param: Param) -> tuple[Scalar, ...]:
    distribution = param.distribution
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    return enumerated(distribution, _MOST_VALUES) or (distribution.low, distribution.high)


def first_value(param: Param) -> Scalar:
    """Return the first value that a key can get, in the order of the study file."""
    return _listed_or_ends(param)[0]


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
