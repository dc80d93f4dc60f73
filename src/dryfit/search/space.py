"""The search space of a study: declared once, static, with conditions that look back only."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from optuna.distributions import CategoricalDistribution

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import LedgerError
from dryfit.core.settings import ModelSettings, TrialSettings
from dryfit.core.trial import Scalar
from dryfit.core.wire import canonical_json
from dryfit.search.declare import declare
from dryfit.search.fields import apply_params
from dryfit.search.params import Param, enumerated, from_text, public_name, to_text, when_from_json

_MOST_PAIRS = 64
_MOST_BRANCHES = 4096


class _NotEnumerableError(Exception):
    """The pairs cannot be listed, or are too many."""


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
        """The space a study file declares.

        Raises:
            ConfigError: A searched key, one of its values or a condition is wrong; see :mod:`dryfit.search.declare`.
        """
        return cls(declare(config.space, config.trial_settings))

    @classmethod
    def from_json(cls, text: str) -> "Space":
        """A space from :meth:`to_json`; it is trusted, not checked against today's settings.

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
        """The whole space as canonical JSON."""
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

    @property
    def fingerprint(self) -> str:
        """Hash of the space."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def cases(self, name: str) -> tuple[Param, ...]:
        """All cases of a public name; none where it is not searched."""
        return self._by_name.get(name, ())

    def active(self, name: str, drawn: Mapping[str, Scalar]) -> Param | None:
        """The case of a key that applies to the values drawn so far; at most one does."""
        return next((param for param in self.cases(name) if param.applies(drawn)), None)

    def read(self, internal: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """What parameters of an earlier trial mean in this space, by today's internal names.

        Only values count, not what they were once drawn from: a value that this space could draw is evidence, also
        where choices were added, a range was moved or cases were renumbered; any other is left out, and with it
        what depends on it.
        """
        before = {public_name(name): value for name, value in internal.items()}
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
        """Every (model, max_length) a trial of this space can have.

        Only the base's own pair where they cannot be listed (a continuous range) or are more than 64.
        """
        try:
            return self._pairs(base)
        except _NotEnumerableError:
            return [(base.model, base.train.max_length)]

    def _pairs(self, base: TrialSettings) -> list[tuple[ModelSettings, int]]:
        deciding = [name for name in self._by_name if name.startswith("model.") or name == "train.max_length"]
        branches: list[dict[str, Scalar]] = [{}]
        for name in self._closure(deciding):
            branches = [
                drawn if value is None else {**drawn, name: value}
                for drawn in branches
                for value in self._outcomes(name, drawn, must_list=name in deciding)
            ]
            if len(branches) > _MOST_BRANCHES:
                raise _NotEnumerableError
        chosen = [{name: value for name, value in drawn.items() if name in deciding} for drawn in branches]
        variants = {canonical_json(values): values for values in chosen}
        if len(variants) > _MOST_PAIRS:
            raise _NotEnumerableError
        settings = [apply_params(base, values) for values in variants.values()]
        return [(one.model, one.train.max_length) for one in settings]

    def _closure(self, names: list[str]) -> list[str]:
        """The names and all that their conditions ask for, in order."""
        needed = set(names)
        for param in reversed(self.params):
            if param.name in needed:
                needed.update(key for key, _ in param.when)
        return [name for name in self._by_name if name in needed]

    def _outcomes(self, name: str, drawn: Mapping[str, Scalar], *, must_list: bool) -> tuple[Scalar, ...]:
        """The values a key can get after ``drawn``; None stands for no value, or for one nobody asks about."""
        param = self.active(name, drawn)
        if param is None:
            return (None,)
        values = enumerated(param.distribution, _MOST_PAIRS)
        if values is not None and (must_list or isinstance(param.distribution, CategoricalDistribution)):
            return values
        if must_list:
            raise _NotEnumerableError
        asked = dict.fromkeys(value for other in self.params for key, vs in other.when if key == name for value in vs)
        return (*(value for value in asked if param.contains(value)), None)
