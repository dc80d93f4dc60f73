"""What commands answer: JSON (:class:`Answer`), and lines and tables that terminals and notebooks show."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import singledispatch
from importlib.resources import files
from itertools import groupby, pairwise
from typing import Final, Self, TypeAlias

from jinja2 import Environment, FunctionLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich.cells import cell_len

from dryfit.settings.text import Table, number_text, printable
from dryfit.settings.trial import Scalar

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

    schema_version: int = Field(default=1, serialization_alias="schema", description="version of this object")


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
class Line:
    """A line with how a terminal shows it.

    Attributes:
        style: Its colour; empty: none.
        aside: Whether it is no part of the result: a terminal has it on stderr.
    """

    text: str
    style: str = ""
    aside: bool = False


Block: TypeAlias = str | Line | Table


@dataclass(frozen=True, slots=True)
class Document:
    """An answer as lines and tables, in the order of a terminal; the first line names it.

    Attributes:
        blocks: An empty line sets parts apart.
    """

    blocks: tuple[Block, ...]

    def html(self) -> str:
        """Return it as a fragment of HTML without scripts; every text is escaped."""
        shown = [block for block in self._plain() if block != ""]
        parts = [list(part) for _, part in groupby(shown[1:], key=lambda block: isinstance(block, Table))]
        return templates().get_template("page.document.html").render(head=shown[:1], parts=parts, look=look)

    def text(self) -> str:
        """Return it as lines, the tables aligned; no terminal obeys anything in it."""
        lines: list[str] = []
        for block in self._plain():
            lines += ["", *_aligned(block), ""] if isinstance(block, Table) else [block]
        kept = [line for line, before in pairwise([*lines, ""]) if line or before]
        return "\n".join(kept).strip("\n")

    def _plain(self) -> list[str | Table]:
        """Return its blocks with all control characters escaped, without styles."""
        return [
            _printable_table(block)
            if isinstance(block, Table)
            else printable(block if isinstance(block, str) else block.text)
            for block in self.blocks
        ]

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        return self.text()


@singledispatch
def document_of(answer: object) -> Document:
    """Return an answer's document for terminal and notebook, by the renderer that its module registered."""
    raise TypeError(f"nobody has said how a {type(answer).__name__} is shown")


@singledispatch
def json_of(answer: object) -> object:
    """Return an answer's ``--json`` object: the answer itself, unless its module registered another."""
    return answer


_ANY: Final[TypeAdapter[object]] = TypeAdapter(object, config=ConfigDict(ser_json_inf_nan="null"))


def json_text(answer: object) -> str:
    """Return an answer as one JSON object; numbers that are not finite are null."""
    return _ANY.dump_json(json_of(answer), by_alias=True).decode()


def _printable_table(table: Table) -> Table:
    return Table(tuple(map(printable, table.heads)), tuple(tuple(map(printable, row)) for row in table.rows))


def _aligned(table: Table) -> list[str]:
    rows = (table.heads, *table.rows)
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(table.heads))]
    return [
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def templates() -> Environment:
    """Return the environment of this package's templates; it escapes every text."""
    return Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(asset))


def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files("dryfit.documents").joinpath(name).read_text(encoding="utf-8")


def look(cell: str) -> str:
    """Return the class of a table cell by its text."""
    if _MEASURED.fullmatch(cell):
        return "number"
    return "long" if len(cell) > _LONG_CELL else ""
