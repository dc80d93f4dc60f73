"""Tables of text, and the format of their numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows of text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number_text(value: float | None) -> str:
    """Format a metric; a dash for None."""
    return "-" if value is None else f"{value:.4f}"
