"""Keys that a task may search, and the values that each may have."""

import re
from dataclasses import dataclass
from typing import Final, Protocol

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.settings.task_facts import is_own_key
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.fields import as_set, legal_range, number_type, require_searchable

Number = int | float


class Keys(Protocol):
    """The names that a space may search."""

    def require(self, key: str, doing: str) -> None:
        """Refuse a name that cannot be searched.

        Raises:
            ConfigError: With the reason, and what may be searched.
        """
        ...

    def as_set(self, key: str, value: Scalar, doing: str) -> Scalar:
        """Return the value as a trial gets it.

        Raises:
            ConfigError: The value is illegal there.
        """
        ...

    def number_type(self, key: str, given: tuple[Number, ...]) -> type[int] | type[float] | None:
        """Return whether a range holds integers or floats; None where the key holds no numbers.

        Args:
            given: The range's ``low`` and ``high``, and ``step`` if there is one.
        """
        ...

    def legal(self, key: str) -> str:
        """Describe what a key accepts."""
        ...


@dataclass(frozen=True, slots=True)
class SettingsKeys:
    """The settings of a trial that trains a model.

    Attributes:
        base: The study file's own values.
    """

    base: TrialSettings

    def require(self, key: str, doing: str) -> None:
        """See :class:`Keys`."""
        require_searchable(key, doing)

    def as_set(self, key: str, value: Scalar, doing: str) -> Scalar:
        """See :class:`Keys`."""
        return as_set(self.base, key, value, doing)

    def number_type(self, key: str, given: tuple[Number, ...]) -> type[int] | type[float] | None:
        """See :class:`Keys`; decided by the field where dryfit knows it, not by how the bounds are written."""
        return FreeKeys().number_type(key, given) if is_own_key(key) else number_type(key)

    def legal(self, key: str) -> str:
        """See :class:`Keys`."""
        return legal_range(key)


_FREE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,99}")


class FreeKeys:
    """Keys of a user's own function: any value is legal."""

    def require(self, key: str, doing: str) -> None:
        """See :class:`Keys`. The characters that number cases here and in the mirror are not allowed."""
        if not _FREE_NAME.fullmatch(key):
            raise ConfigError(
                doing,
                f"{key!r} is no name of a parameter",
                "a letter or _, then letters, digits and _ . / - (100 at most)",
            )

    def as_set(self, key: str, value: Scalar, doing: str) -> Scalar:
        """See :class:`Keys`."""
        return value

    def number_type(self, key: str, given: tuple[Number, ...]) -> type[int] | type[float] | None:
        """See :class:`Keys`; integers where all numbers are written so."""
        return int if all(isinstance(number, int) for number in given) else float

    def legal(self, key: str) -> str:
        """See :class:`Keys`."""
        return "integers, or numbers with a decimal point"


def keys_of(config: StudyConfig) -> Keys:
    """Return the keys that a study may search."""
    return FreeKeys() if config.study.task is BuiltInTask.OBJECTIVE else SettingsKeys(config.trial_settings)
