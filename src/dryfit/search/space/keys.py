"""Keys that a task may search, and the values that each may have."""

import re
from typing import Final

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.settings.task_facts import facts_of, is_own_key
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.fields import apply_params, legal_range, number_type, require_searchable, setting

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
