"""Objects with a readable form in notebooks and in print; the package that knows the form registers it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Looks(Protocol):
    """What an object looks like."""

    def html(self) -> str:
        """Return it for a notebook, every text escaped."""
        ...

    def text(self) -> str:
        """Return it for a terminal."""
        ...


class Printer(Protocol):
    """The part of IPython's printer that is used."""

    def text(self, text: str, /) -> None:
        """Print a text."""
        ...


_MAKERS: dict[type, Callable[[Any], Looks]] = {}

ShownT = TypeVar("ShownT", bound="Shown")


class Shown:
    """An object that notebooks show as HTML, and that prints as lines and tables.

    The packages of these objects do not know how anything looks; whoever imports :mod:`dryfit.api` has it registered.
    """

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        looks = self._looks()
        return None if looks is None else looks.html()

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))

    def __str__(self) -> str:
        looks = self._looks()
        return repr(self) if looks is None else looks.text()

    def _looks(self) -> Looks | None:
        make = _MAKERS.get(type(self))
        return None if make is None else make(self)


def shown_by(kind: type[ShownT], make: Callable[[ShownT], Looks]) -> None:
    """Register the displayed form of a class's objects."""
    _MAKERS[kind] = make
