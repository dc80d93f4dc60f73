"""Read JSON, CSV and TSV files of other programs, with errors that name the line."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from dryfit.core.errors import DataError
from dryfit.core.text.json_text import parse_json
from dryfit.core.text.lines import bounded_lines, csv_reader, decoded, existing_file
from dryfit.core.text.words import few, first_line
from dryfit.importers.items import Rejected

M = TypeVar("M", bound=BaseModel)

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
