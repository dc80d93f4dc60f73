"""The search space of a study: a fixed list of parameters whose conditions refer to earlier ones."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from optuna.distributions import CategoricalDistribution

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import LedgerError
from dryfit.core.settings.tables import ModelSettings, TrialSettings
from dryfit.core.settings.trial import Scalar
from dryfit.core.wire import canonical_json
from dryfit.search.space.declare import declare
from dryfit.search.space.fields import apply_params, keys_of
from dryfit.search.space.params import Param, enumerated, from_text, public_name, to_text, when_from_json

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
                :mod:`dryfit.search.space.declare`.
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
