"""Files of other programs, read with errors that name the line; and the items that a format yields."""

import csv
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from dryfit.settings.errors import DataError
from dryfit.settings.splits import derive_seed
from dryfit.settings.text import bounded_lines, csv_reader, decoded, existing_file, few, first_line
from dryfit.settings.wire import parse_json

# Items that the reader of a format yields: rows, rejected parts and left-out rows; with helpers for spans.


Span: TypeAlias = tuple[int, int]
"""``[start, end)`` in characters of a text."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ImportedRow:
    """One row as it will be written; see docs/data.md.

    Attributes:
        id: Unique in what is written.
        group: Rows of a group stay in one split; None: the row is a group of its own.
        criterion: The statement that the text is judged by; None: the data set has text alone.
        text: The text.
        label: Its class.
        evidence: Spans of the text, in order; None: the data set has no evidence.
        place: Where it came from, for messages.
    """

    id: str
    group: str | None
    criterion: str | None
    text: str
    label: int
    evidence: tuple[Span, ...] | None
    place: str

    def as_json(self) -> str:
        """Return the row as one line; fields that are None are absent."""
        fields = {name: value for name, value in asdict(self).items() if name != "place" and value is not None}
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A part of the source that does not fit, and gives no row.

    Attributes:
        place: File, and line or path in its JSON.
        reason: What is wrong, never with the text of a row: data sets may hold what people said of themselves.
    """

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Valid rows that were left out on request.

    Attributes:
        rows: How many.
    """

    rows: int


Item: TypeAlias = ImportedRow | Rejected | LeftOut


class UnfitError(Exception):
    """Why a part of a source gives no row.

    Args:
        reason: As of :class:`Rejected`.
        at: Where in the part: ``.answers[0]``.
    """

    def __init__(self, reason: str, at: str = "") -> None:
        super().__init__(reason)
        self.at = at


def fault_of(row: ImportedRow) -> str | None:
    """Return why a study would refuse a row; None if it is valid."""
    texts = {"id": row.id, "group": row.group, "criterion": row.criterion, "text": row.text}
    for name, text in texts.items():
        if text is None:
            continue
        if not text.strip():
            return f"{name} is empty: {text!r}"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{name} has half of a surrogate pair, which is no character"
    if row.label < 0:
        return f"label is {row.label}, which is below 0"
    for start, end in row.evidence or ():
        if not 0 <= start < end <= len(row.text):
            return f"evidence has [{start}, {end}], outside the text of {len(row.text)} characters"
    return None


def read_as(model: type[M], part: Any) -> M:
    """Return a part of a JSON document as a model of pydantic.

    Raises:
        UnfitError: It is another; the first thing that is wrong is told.
    """
    try:
        return model.model_validate(part)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise UnfitError(first["msg"][:1].lower() + first["msg"][1:], steps) from error


def each(
    parts: Sequence[T] | Mapping[str, T], place: str, read: Callable[[Any, T, str], Iterable[Item]]
) -> Iterator[Item]:
    """Yield the items of each part of a list or an object; what does not fit is one item, and the rest follow.

    Args:
        parts: The parts.
        place: Where they are: ``dev.json, data``.
        read: Returns a part's items, given its index or key, the part and its place. It raises :class:`UnfitError`.
    """
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        at = f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}"
        try:
            yield from read(key, part, at)
        except UnfitError as unfit:
            yield Rejected(at + unfit.at, str(unfit))


def trimmed(text: str, span: Span) -> Span | None:
    """Return a span without the white space at its ends; None where it is nothing else."""
    start, end = span
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    end -= len(inside) - len(inside.rstrip())
    return (start, end) if start < end else None


def joined(text: str, spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans and merge those that overlap, or have only white space between them."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and not text[merged[-1][1] : start].strip():
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def drawn(candidates: Sequence[T], count: int | None, name: Callable[[T], Hashable]) -> list[T]:
    """Draw some of the candidates, in their order: those with the smallest hashes of their names, the same every time.

    Args:
        candidates: The candidates.
        count: How many at most; None: all.
        name: Returns a candidate's name, different for each.
    """
    if count is None or count >= len(candidates):
        return list(candidates)
    ranked = sorted(range(len(candidates)), key=lambda index: derive_seed("drawn", ascii(name(candidates[index]))))
    return [candidates[index] for index in sorted(ranked[:count])]


_KEYS: Final = {"squad": {"data"}, "contractnli": {"documents", "labels"}}
_NAMES: Final = {"squad": "SQuAD", "contractnli": "ContractNLI"}
_OTHER_SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a table.

    Attributes:
        values: Column to cell.
        number: Line on which it begins, from 1.
        place: File and line, for messages.
    """

    values: dict[str, str]
    number: int
    place: str


_Row: TypeAlias = tuple[int, list[str] | DataError]
"""The line on which a row begins, and its cells, or why it has none."""


def read_json(source: str) -> Any:
    """Read a JSON document.

    Raises:
        DataError: The file is absent, empty, not UTF-8 or not JSON.
    """
    content = existing_file(source, allowed="a JSON file").read_bytes()
    doing = f"reading {source}"
    text = decoded(content, doing).removeprefix("\ufeff")
    if not text.strip():
        raise DataError(doing, "it is empty", "one JSON object")
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        found = f"not JSON: {error.msg}"
        raise DataError(f"{doing}, line {error.lineno}, column {error.colno}", found, "one JSON object") from error
    except ValueError as error:
        raise DataError(doing, first_line(error), "one JSON object") from error


def whole(model: type[M], document: Any, source: str, allowed: str, other: Literal["squad", "contractnli"]) -> M:
    """Return the top level of a JSON document.

    Args:
        model: Of pydantic.
        document: The parsed file.
        source: Its name.
        allowed: What it should be, for the error.
        other: The format that it may be instead.

    Raises:
        DataError: It is of another format.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        is_other = isinstance(document, dict) and _KEYS[other] <= cast(dict[str, Any], document).keys()
        hint = f"is it {_NAMES[other]}? `dryfit import {other}`" if is_other else ""
        raise DataError(f"reading {source}", _top_level(document), allowed, hint) from error


def _top_level(document: Any) -> str:
    """Describe the top level of a JSON document that is of another format."""
    if not isinstance(document, dict):
        return f"it is no object, but of type {type(document).__name__}"
    keys = list(cast(dict[str, Any], document))
    return f"its keys are {few(keys)}" if keys else "it is an object without keys"


def csv_records(source: str, needed: Sequence[str]) -> Iterator[Record | Rejected]:
    """Yield the rows of a CSV file with a header: commas, quotes doubled inside quotes (RFC 4180).

    Args:
        source: The file.
        needed: Columns that the file must have.

    Raises:
        DataError: The file is absent, empty, not UTF-8, without such a column, or its quotes never end.
    """
    with existing_file(source, allowed="a CSV file").open("rb") as file:
        yield from _records(_csv_rows(file, source), source, needed, ",", "a header and rows")


def tsv_records(source: str, needed: Sequence[str], *, header: bool) -> Iterator[Record | Rejected]:
    """Yield the rows of a file with tab-separated cells, one row a line; a quote is an ordinary character.

    GLUE's files are written and read this way (``quoting=csv.QUOTE_NONE`` in its readers).

    Args:
        source: The file.
        needed: Columns that the file must have.
        header: Whether its first line names the columns; else they are called 1, 2, ...

    Raises:
        DataError: The file is absent, empty, or without such a column.
    """
    with existing_file(source, allowed="a TSV file").open("rb") as file:
        allowed = "rows, with tabs between their cells"
        yield from _records(_tsv_rows(file, source), source, needed, "\t", allowed, header=header)


def text_file_lines(source: str, allowed: str) -> list[str]:
    """Return the lines of a text file, without their ends.

    Args:
        source: The file.
        allowed: What it should be, for the error.

    Raises:
        DataError: It is absent or not UTF-8.
    """
    content = existing_file(source, allowed=allowed).read_bytes()
    return decoded(content, f"reading {source}").removeprefix("\ufeff").replace("\r\n", "\n").split("\n")


def base_name(source: str) -> str:
    """Return the file's name without folder and suffix, for the ids of rows that have none."""
    return Path(source).stem


def _csv_rows(file: BinaryIO, source: str) -> Iterator[_Row]:
    reader, begins = csv_reader(file, source), 1
    try:
        for cells in reader:
            yield begins, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        doing = f"reading {source}, the row from line {begins} on"
        raise DataError(doing, f"not CSV: {error}", hint="check its quotes") from error


def _tsv_rows(file: BinaryIO, source: str) -> Iterator[_Row]:
    for number, line in bounded_lines(file, source):
        try:
            text = decoded(line.rstrip(b"\r\n"), f"reading {source}, line {number}")
        except DataError as error:
            yield number, error
            continue
        text = text.removeprefix("\ufeff") if number == 1 else text
        yield number, text.split("\t") if text else []


def _records(
    rows: Iterator[_Row], source: str, needed: Sequence[str], separator: str, allowed: str, *, header: bool = True
) -> Iterator[Record | Rejected]:
    columns: list[str] | None = None
    for number, cells in rows:
        place = f"{source}, line {number}"
        if isinstance(cells, DataError):
            if columns is None:
                raise cells
            yield Rejected(place, cells.found)
            continue
        if columns is None and cells:
            names = cells if header else [str(index) for index in range(1, len(cells) + 1)]
            columns = _header(names, source, needed, separator)
            if header:
                continue
        if columns is None or not cells:
            continue
        if len(cells) != len(columns):
            yield Rejected(place, f"it has {len(cells)} columns, not {len(columns)}")
        else:
            yield Record(dict(zip(columns, cells, strict=True)), number, place)
    if columns is None:
        raise DataError(f"reading {source}", "it is empty", allowed)


def _header(names: list[str], source: str, needed: Sequence[str], separator: str) -> list[str]:
    doing = f"reading {source}"
    absent = [name for name in needed if name not in names]
    for other, words in _OTHER_SEPARATORS.items() if absent else ():
        if other != separator and set(needed) <= set(separator.join(names).split(other)):
            right = _OTHER_SEPARATORS[separator]
            raise DataError(doing, f"its columns are separated by {words}", right, f"save it with {right}")
    if absent:
        raise DataError(doing, f"there is no column {few(map(repr, absent))}", f"its columns: {few(names, most=20)}")
    twice = [name for name in needed if names.count(name) > 1]
    if twice:
        raise DataError(doing, f"column {twice[0]!r} is there twice", "different names")
    return names
