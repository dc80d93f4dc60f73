"""Text for messages: short lists of names, and text that UTF-8 can encode."""

from collections.abc import Iterable


def few(names: Iterable[str], most: int = 5) -> str:
    """Return the first names and a count of the rest; unprintable names are escaped."""
    every = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: file names may contain bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()
