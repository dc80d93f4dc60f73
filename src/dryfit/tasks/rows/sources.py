"""Read raw rows from JSONL, CSV, Parquet and hub data sets, each with its place in the source."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dryfit.core.errors import DataError
from dryfit.core.settings.tables import HUB_DEFAULT_SPLIT, HUB_PREFIX
from dryfit.core.text.lines import decoded, existing_file, without_mark

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
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_row(line.removesuffix(b"\n"), source, number)


def _json_row(line: bytes, source: str, number: int) -> RawRow | BadRow:
    where = f"reading {source}, line {number}"
    try:
        values = json.loads(decoded(line, where))
    except DataError as error:
        return BadRow(number, error)
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}"
        return BadRow(number, DataError(where, problem, allowed="one JSON object a line"))
    if not isinstance(values, dict):
        problem = f"{line[:60].decode(errors='replace')!r} is no object"
        return BadRow(number, DataError(where, problem, allowed="one JSON object a line"))
    return RawRow(values, source, number)


def _csv(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    with path.open("rb") as file:
        lines = (decoded(line, f"reading {source}, line {number}") for number, line in enumerate(file, start=1))
        reader = csv.DictReader(without_mark(lines), strict=True)
        try:
            for values in reader:
                number = reader.line_num
                if None in values or None in values.values():
                    width = len(reader.fieldnames or ())
                    problem = f"the row has not {width} columns like the header"
                    where = f"reading {source}, line {number}"
                    yield BadRow(number, DataError(where, problem, hint="check the quoting"))
                else:
                    yield RawRow(dict(values), source, number)
        except csv.Error as error:
            raise DataError(f"reading {source}, line {reader.line_num}", f"not CSV: {error}") from error


def _parquet(path: Path, source: str) -> Iterator[RawRow]:
    import pyarrow  # heavy, and only such files need it
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_ROWS):
                for values in batch.to_pylist():
                    yield RawRow(values, source, number)
                    number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"reading {source}", f"not Parquet: {str(error).splitlines()[0]}") from error


def _hub(source: str) -> Iterator[RawRow]:
    import datasets  # heavy, and only such sources need it
    from datasets.exceptions import DatasetNotFoundError

    name, split, config = [*source.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
    try:
        rows = datasets.load_dataset(name, config or None, split=split or HUB_DEFAULT_SPLIT)
    except (ValueError, FileNotFoundError, DatasetNotFoundError) as error:
        raise DataError(
            f"reading {source}",
            str(error).splitlines()[0],
            allowed=f"hub:NAME[:SPLIT[:CONFIG]]; without SPLIT: {HUB_DEFAULT_SPLIT}",
        ) from error
    for number, values in enumerate(rows):
        yield RawRow(dict(values), source, number)
