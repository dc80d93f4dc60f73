"""The parameters of a trial, which know whether they were read."""

from collections.abc import ItemsView, Mapping, ValuesView
from typing import Any, final

from dryfit.core.settings.trial import Scalar


@final
class ReadParams(dict[str, Scalar]):
    """Searched values by their names; whoever looks at all values at once has read them all.

    Args:
        values: The values.
    """

    def __init__(self, values: Mapping[str, Scalar]) -> None:
        super().__init__(values)
        self._unread = dict.fromkeys(values)

    @property
    def unread(self) -> tuple[str, ...]:
        """The parameters that nobody has read so far."""
        return tuple(self._unread)

    def __getitem__(self, name: str) -> Scalar:
        self._unread.pop(name, None)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default where there is none of that name."""
        self._unread.pop(name, None)
        return super().get(name, default)

    def items(self) -> ItemsView[str, Scalar]:  # pyright: ignore[reportIncompatibleMethodOverride]  # dict's own class
        """Return all names with their values."""
        self._unread.clear()
        return super().items()

    def values(self) -> ValuesView[Scalar]:  # pyright: ignore[reportIncompatibleMethodOverride]  # dict's own class
        """Return all values."""
        self._unread.clear()
        return super().values()

    def copy(self) -> dict[str, Scalar]:
        """Return a plain copy."""
        return dict(self.items())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.copy() | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(other) | self.copy()
