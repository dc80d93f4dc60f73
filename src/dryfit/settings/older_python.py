"""What the standard library of Python 3.10 lacks: code that runs in a user's own environment may meet that version."""

import sys
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

__all__ = ["Self", "StrEnum", "dataclass_transform"]

if TYPE_CHECKING or sys.version_info >= (3, 11):
    from enum import StrEnum
    from typing import Self, dataclass_transform
else:
    Self = Any

    class StrEnum(str, Enum):  # noqa: UP042  # it is not there
        """An enumeration whose members are texts."""

        __str__ = str.__str__

    def dataclass_transform(**_options: Any) -> Callable[[Any], Any]:
        """Return a decorator that changes nothing: only type checkers read it."""
        return lambda kind: kind
