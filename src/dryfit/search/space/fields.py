"""Settings that may be searched: their types and legal ranges, and how values are put into them."""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any, Final, cast

from pydantic import ValidationError

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.settings.task_facts import OWN_TABLE, facts_of, is_own_key
from dryfit.core.settings.trial import Scalar

_NEVER_SEARCHED = {
    "data": "all trials must be scored on the same rows",
    "study": "it describes the study, not a trial",
    "space": "it is the search space itself",
    "search": "it describes the search, not a trial",
    "execution": "how a trial is run is planned, never searched: it changes memory and time, not what is learned",
    "runtime": "how trials are run is planned, never searched: it does not change what is learned",
}

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@cache
def _schema() -> dict[str, Any]:
    return TrialSettings.model_json_schema()


@cache
def searchable_keys() -> tuple[str, ...]:
    """Return every dotted name that may be searched; a task of the user's own declares further ones."""
    return tuple(f"{table}.{name}" for table in TrialSettings.model_fields for name in _table(table))


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return _schema()["$defs"][reference.rpartition("/")[2]] if reference else node


def _table(table: str) -> dict[str, Any]:
    return _resolved(_schema()["properties"][table])["properties"]


def _alternatives(key: str) -> list[dict[str, Any]]:
    """Return the JSON schemas that a field accepts, without null, which no study file can write."""
    table, _, name = key.partition(".")
    node = _resolved(_table(table)[name])
    nodes = [_resolved(choice) for choice in cast("list[dict[str, Any]]", node.get("anyOf", [node]))]
    return [choice for choice in nodes if choice.get("type") != "null"]


def number_type(key: str) -> type[int] | type[float] | None:
    """Return whether a field holds integers, floats, or no numbers (None). Not for keys that a user's task declares."""
    kinds = {node.get("type") for node in _alternatives(key)}
    if "number" in kinds:
        return float
    return int if "integer" in kinds else None


def legal_range(key: str) -> str:
    """Describe the accepted values of a field."""
    if is_own_key(key):
        return "a number, text, true or false"
    return " or ".join(_words(node) for node in _alternatives(key))


def _words(node: dict[str, Any]) -> str:
    if "enum" in node or "const" in node:
        return ", ".join(json.dumps(value) for value in node.get("enum", [node.get("const")]))
    bounds = [f"{sign} {node[bound]:g}" for bound, sign in _BOUNDS.items() if bound in node]
    return " ".join([str(node.get("type", "value")), ", ".join(bounds)]).strip()


def require_searchable(key: str, doing: str) -> None:
    """Refuse a key that no trial has.

    Raises:
        ConfigError: With the reason, or the nearest key that may be searched.
    """
    if key in searchable_keys() or is_own_key(key):
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
        suggestion(key, searchable_keys()),
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
        raise ConfigError(doing, found, legal_range(key)) from error


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
        return super().number_type(key, given) if is_own_key(key) else number_type(key)

    def legal(self, key: str) -> str:
        """See :class:`Keys`."""
        return legal_range(key)


def keys_of(config: StudyConfig) -> Keys:
    """Return the keys that a study may search."""
    return Keys() if facts_of(config.study.task).calls_function else SettingsKeys(config.trial_settings)
