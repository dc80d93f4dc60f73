"""What commands answer: JSON (:class:`Answer`), and lines and tables that terminals and notebooks show."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Self

from jinja2 import Environment, FunctionLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field
from rich.cells import cell_len

from dryfit.core.settings.trial import Scalar
from dryfit.core.text.words import printable

_LONG_CELL = 60
_MEASURED = re.compile(r"-|-?[\d.,]+(?:e[+-]?\d+)?%?(?: (?:s|h|min|[KMG]iB))?")


class View(BaseModel):
    """A part of an answer; numbers that are not finite are null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="null")

    @classmethod
    def of(cls, source: object, **others: object) -> Self:
        """Return a view of an object.

        Args:
            source: What is viewed: its attributes are the fields of the same names.
            others: All further fields, and those that differ from the attribute of that name.

        Raises:
            ValidationError: A field is missing, or has another type.
        """
        same = {name: getattr(source, name) for name in cls.model_fields if hasattr(source, name)}
        return cls.model_validate({**same, **others})


class Answer(View):
    """One whole answer, beginning with the version of its schema."""

    schema_version: int = Field(default=1, serialization_alias="schema")


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows of text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number_text(value: float | None) -> str:
    """Format a metric; a dash for None."""
    return "-" if value is None else f"{value:.4f}"


def value_text(value: Scalar) -> str:
    """Format a parameter."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def params_text(params: dict[str, Scalar]) -> str:
    """Format parameters in one line."""
    return "  ".join(f"{name}={value_text(value)}" for name, value in params.items())


def duration_text(seconds: float) -> str:
    """Format a duration."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def time_text(at_s: float) -> str:
    """Format a Unix time, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``2 trials``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """Cut a text to ``most`` characters, an ellipsis included."""
    return text if len(text) <= most else text[: most - 1] + "…"


def measured_text(value: float | None, spread: float | None) -> str:
    """Format a value; with ``spread`` it is a mean, and the standard deviation follows."""
    return number_text(value) if spread is None else f"{number_text(value)} ± {number_text(spread)}"


@dataclass(frozen=True, slots=True)
class Card:
    """An object in lines and tables.

    Attributes:
        title: What it is, in one line.
        lines: What is said of it.
        tables: Each with its caption; empty: none.
    """

    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()

    def html(self) -> str:
        """Return it as a fragment of HTML without scripts; every text is escaped."""
        return render_card(self.plain())

    def text(self) -> str:
        """Return it as lines, the tables aligned; no terminal obeys anything in it."""
        card = self.plain()
        blocks = [[card.title, *(f"  {line}" for line in card.lines)]]
        blocks += [[*([caption] if caption else []), *_aligned(table)] for caption, table in card.tables]
        return "\n\n".join("\n".join(block) for block in blocks)

    def plain(self) -> "Card":
        """Return the card with all control characters escaped."""
        return Card(
            printable(self.title),
            tuple(printable(line) for line in self.lines),
            tuple((printable(caption), _printable_table(table)) for caption, table in self.tables),
        )

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        return self.text()


def _printable_table(table: Table) -> Table:
    return Table(tuple(map(printable, table.heads)), tuple(tuple(map(printable, row)) for row in table.rows))


def _aligned(table: Table) -> list[str]:
    rows = (table.heads, *table.rows)
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(table.heads))]
    return [
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def render_card(card: object) -> str:
    """Return lines and tables (``title``, ``lines``, ``tables``) as a fragment of HTML without scripts."""
    return templates().get_template("page.card.html").render(card=card, look=look)


def templates() -> Environment:
    """Return what loads the templates of this package; it escapes every text."""
    return Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(asset))


def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files("dryfit.reporting").joinpath(name).read_text(encoding="utf-8")


def look(cell: str) -> str:
    """Return the class of a table cell by what it says."""
    if _MEASURED.fullmatch(cell):
        return "number"
    return "long" if len(cell) > _LONG_CELL else ""
