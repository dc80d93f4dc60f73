"""Read raw rows from JSONL, CSV, Parquet and hub data sets, each with its place in the source."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dryfit.core.errors import DataError
from dryfit.core.settings.tables import HUB_DEFAULT_SPLIT, HUB_PREFIX
from dryfit.core.text.json_text import parse_json
from dryfit.core.text.lines import bounded_lines, check_names, csv_reader, decoded, existing_file
from dryfit.core.text.words import brief, first_line

_READERS = (".jsonl", ".csv", ".parquet")
_PARQUET_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as its file has it.

    Attributes:
        values: Column to value.
        source: The file, or hub name, it came from.
        number: Line of a text file, counted from 1; index of any other row, from 0.
    """

    values: dict[str, Any]
    source: str
    number: int

    @property
    def place(self) -> str:
        """Where the row is, for messages."""
        unit = "line" if self.source.endswith((".jsonl", ".csv")) else "row"
        return f"{self.source}, {unit} {self.number}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read, while the rows after it can.

    Attributes:
        number: As of a :class:`RawRow`.
        error: What is wrong with it.
    """

    number: int
    error: DataError


def read_rows(source: str) -> list[RawRow]:
    """Read every row of a source.

    Args:
        source: A ``.jsonl``, ``.csv`` or ``.parquet`` file, or ``hub:NAME[:SPLIT[:CONFIG]]``.

    Raises:
        DataError: The source is missing, of another kind or not UTF-8, or a line is not a JSON object.
    """
    rows: list[RawRow] = []
    for row in stream_rows(source):
        if isinstance(row, BadRow):
            raise row.error
        rows.append(row)
    return rows


def stream_rows(source: str) -> Iterator[RawRow | BadRow]:
    """Read a source row by row; files take the memory of a few rows, whatever their size.

    Args:
        source: As for :func:`read_rows`.

    Yields:
        Each row, or its error where the next row can still be read.

    Raises:
        DataError: The source cannot be read any further; or at once, where it is missing or of another kind.
    """
    if source.startswith(HUB_PREFIX):
        return _hub(source)
    path = existing_file(source, allowed="a .jsonl, .csv or .parquet file, or hub:NAME[:SPLIT[:CONFIG]]")
    match path.suffix:
        case ".jsonl":
            return _jsonl(path, source)
        case ".csv":
            return _csv(path, source)
        case ".parquet":
            return _parquet(path, source)
        case suffix:
            raise DataError(f"reading {source}", f"files of kind {suffix!r} are not read", allowed=", ".join(_READERS))


def _jsonl(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    with path.open("rb") as file:
        for number, line in bounded_lines(file, source):
            if line.strip():
                yield _json_row(line.removesuffix(b"\n"), source, number)


def _json_row(line: bytes, source: str, number: int) -> RawRow | BadRow:
    where = f"reading {source}, line {number}"
    try:
        values = parse_json(decoded(line, where))
    except DataError as error:
        return BadRow(number, error)
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}"
        return BadRow(number, DataError(where, problem, allowed="one JSON object a line"))
    except ValueError as error:
        return BadRow(number, DataError(where, first_line(error), allowed="one JSON object a line"))
    if not isinstance(values, dict):
        problem = f"{brief(line.decode(), 60)} is no object"
        return BadRow(number, DataError(where, problem, allowed="one JSON object a line"))
    return RawRow(values, source, number)


def _csv(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    with path.open("rb") as file:
        reader = csv_reader(file, source)
        header: list[str] | None = None
        try:
            for cells in reader:
                number: int = reader.line_num
                if header is None:
                    header = list[str](cells)
                    check_names(header, f"{source}, line {number}")
                elif cells and len(cells) != len(header):
                    problem = f"the row has not {len(header)} columns like the header"
                    where = f"reading {source}, line {number}"
                    yield BadRow(number, DataError(where, problem, hint="check the quoting"))
                elif cells:
                    yield RawRow(dict(zip(header, cells, strict=True)), source, number)
        except csv.Error as error:
            raise DataError(f"reading {source}, line {reader.line_num}", f"not CSV: {error}") from error


def _parquet(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    import pyarrow  # heavy, and only such files need it
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_names(file.schema_arrow.names, source)
            for batch in file.iter_batches(_PARQUET_ROWS):
                yield from _batch_rows(batch, source, number)
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"reading {source}", f"not Parquet: {first_line(error)}") from error


def _batch_rows(batch: Any, source: str, first: int) -> Iterator[RawRow | BadRow]:
    """Yield the rows of an Arrow batch; those with a value that Python cannot hold as bad ones."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # texts that are not UTF-8; dates of other ages
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from _batch_rows(batch.slice(index, 1), source, first + index)
            return
        rows = [_unreadable(batch, source, first)]
    for number, values in enumerate(rows, start=first):
        yield values if isinstance(values, BadRow) else RawRow(values, source, number)


def _unreadable(row: Any, source: str, number: int) -> BadRow:
    """Return the error of a batch of one row, with the name of its column."""
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.to_pylist()
        except (ValueError, OverflowError) as error:
            problem = f"column {name!a} cannot be read: {first_line(error)}"
            return BadRow(number, DataError(f"reading {source}, row {number}", problem, "text in UTF-8, and numbers"))
    raise AssertionError("each column can be read, and the row cannot")


def _hub(source: str) -> Iterator[RawRow | BadRow]:
    import datasets  # heavy, and only such sources need it
    from datasets.exceptions import DatasetsError

    doing = f"reading {source}"
    allowed = f"hub:NAME[:SPLIT[:CONFIG]]; without SPLIT: {HUB_DEFAULT_SPLIT}"
    name, split, config = [*source.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
    if not name.strip() or "\0" in source:
        raise DataError(f"reading {source!a}", "it names no data set", allowed=allowed)
    try:
        rows = datasets.load_dataset(name, config or None, split=split or HUB_DEFAULT_SPLIT)
    except (ValueError, FileNotFoundError, ConnectionError, DatasetsError) as error:
        raise DataError(doing, first_line(error), allowed=allowed) from error
    for number in range(len(rows)):
        try:
            row = RawRow(dict(rows[number]), source, number)
        except (ValueError, OverflowError) as error:
            row = BadRow(number, DataError(f"{doing}, row {number}", first_line(error), "text in UTF-8, and numbers"))
        yield row
