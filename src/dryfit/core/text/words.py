"""How messages name many things, the first few and how many more; and what they may hold at all."""

from collections.abc import Iterable


def few(names: Iterable[str], most: int = 5) -> str:
    """The first names, and a count of the rest; what a terminal could not or should not print is escaped."""
    every = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")


def sendable(text: str) -> str:
    """A text that UTF-8 can hold: names of files may have bytes in them that no text has."""
    return text.encode("utf-8", "backslashreplace").decode()
