"""Read JSON, CSV and TSV files of other programs, with errors that name the line."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from dryfit.core.errors import DataError
from dryfit.core.text.json_text import parse_json
from dryfit.core.text.lines import bounded_lines, csv_reader, decoded, existing_file
from dryfit.core.text.words import few, first_line
from dryfit.importers.items import Rejected

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


def top_level(document: Any) -> str:
    """Describe the top level of a JSON document that is of another format."""
    if not isinstance(document, dict):
        return f"it is no object, but of type {type(document).__name__}"
    keys = list(cast(dict[str, Any], document))
    return f"its keys are {few(keys)}" if keys else "it is an object without keys"


def has_keys(document: Any, *keys: str) -> bool:
    """Whether a JSON document is an object with these keys."""
    return isinstance(document, dict) and all(key in document for key in keys)


def csv_records(source: str, needed: Sequence[str]) -> Iterator[Record | Rejected]:
    """Yield the rows of a CSV file with a header: commas, quotes doubled inside quotes (RFC 4180).

    Args:
        source: The file.
        needed: Columns that the file must have.

    Raises:
        DataError: The file is absent, empty, not UTF-8, without such a column, or its quotes never end.
    """
    path = existing_file(source, allowed="a CSV file")
    with path.open("rb") as file:
        reader = csv_reader(file, source)
        begins = 1
        header: list[str] | None = None
        try:
            for cells in reader:
                number, begins = begins, reader.line_num + 1
                if not cells:
                    continue
                if header is None:
                    header = _header(cells, source, needed, ",")
                else:
                    yield _record(header, cells, source, number)
        except csv.Error as error:
            found = f"not CSV: {error}"
            raise DataError(
                f"reading {source}, the row from line {begins} on", found, hint="check its quotes"
            ) from error
    if header is None:
        raise DataError(f"reading {source}", "it is empty", "a header and rows")


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
    path = existing_file(source, allowed="a TSV file")
    columns: list[str] | None = None
    with path.open("rb") as file:
        for number, line in bounded_lines(file, source):
            place = f"{source}, line {number}"
            try:
                text = decoded(line.rstrip(b"\r\n"), f"reading {place}")
            except DataError as error:
                if columns is None:
                    raise
                yield Rejected(place, error.found)
                continue
            cells = (text.removeprefix("\ufeff") if number == 1 else text).split("\t")
            if cells == [""]:
                continue
            if columns is None:
                names = cells if header else [str(index) for index in range(1, len(cells) + 1)]
                columns = _header(names, source, needed, "\t")
                if header:
                    continue
            yield _record(columns, cells, source, number)
    if columns is None:
        raise DataError(f"reading {source}", "it is empty", "rows, with tabs between their cells")


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


def _record(header: list[str], cells: list[str], source: str, number: int) -> Record | Rejected:
    place = f"{source}, line {number}"
    if len(cells) != len(header):
        return Rejected(place, f"it has {len(cells)} columns, not {len(header)}")
    return Record(dict(zip(header, cells, strict=True)), number, place)


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
