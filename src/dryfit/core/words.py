"""How messages name many things: the first few, and how many more."""

from collections.abc import Iterable


def few(names: Iterable[str], most: int = 5) -> str:
    """The first names, and a count of the rest; what a terminal could not or should not print is escaped."""
    every = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")
