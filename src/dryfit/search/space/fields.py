"""Settings that may be searched: their types and legal ranges, and how values are put into them."""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, Final

from pydantic import ValidationError

from dryfit.config.schema import StudyConfig
from dryfit.config.schema_json import SEARCHABLE, legal_values, number_type
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
