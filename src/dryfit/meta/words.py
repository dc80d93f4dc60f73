"""How messages name many things: the first few, and how many more."""

from collections.abc import Iterable


def few(names: Iterable[str], most: int = 5) -> str:
    """The first names, and a count of the rest."""
    every = list(names)
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")
