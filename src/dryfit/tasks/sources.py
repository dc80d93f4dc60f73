"""Read raw rows from JSONL, CSV, Parquet and hub data sets, each with the place it came from."""

import csv
import difflib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dryfit.core.errors import DataError

HUB_PREFIX = "hub:"
_READERS = (".jsonl", ".csv", ".parquet")


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


def read_rows(source: str) -> list[RawRow]:
    """Read every row of a source.

    Args:
        source: A ``.jsonl``, ``.csv`` or ``.parquet`` file, or ``hub:NAME[:SPLIT]``.

    Raises:
        DataError: The source is absent, of another kind, not UTF-8, or a line is no object.
    """
    if source.startswith(HUB_PREFIX):
        return list(_hub(source))
    path = Path(source).expanduser()
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        raise DataError(
            f"reading {source}",
            "there is no such file",
            allowed="a .jsonl, .csv or .parquet file, or hub:NAME[:SPLIT]",
            hint=f"did you mean {path.parent / near[0]}?" if near else "check the path",
        )
    match path.suffix:
        case ".jsonl":
            return list(_jsonl(path, source))
        case ".csv":
            return list(_csv(path, source))
        case ".parquet":
            return list(_parquet(path, source))
        case suffix:
            raise DataError(f"reading {source}", f"files of kind {suffix!r} are not read", allowed=", ".join(_READERS))


def _jsonl(path: Path, source: str) -> Iterator[RawRow]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"reading {source}, line {number}"
        try:
            values = json.loads(_utf8(line, where))
        except json.JSONDecodeError as error:
            raise DataError(
                where, f"not JSON: {error.msg} at column {error.colno}", allowed="one JSON object a line"
            ) from error
        if not isinstance(values, dict):
            raise DataError(where, f"{line[:60].decode()!r} is no object", allowed="one JSON object a line")
        yield RawRow(values, source, number)


def _csv(path: Path, source: str) -> Iterator[RawRow]:
    lines = path.read_bytes().split(b"\n")
    text = "\n".join(_utf8(line, f"reading {source}, line {number}") for number, line in enumerate(lines, start=1))
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        for values in reader:
            where = f"reading {source}, line {reader.line_num}"
            if None in values or None in values.values():
                width = len(reader.fieldnames or ())
                raise DataError(where, f"the row has not {width} columns like the header", hint="check the quoting")
            yield RawRow(dict(values), source, reader.line_num)
    except csv.Error as error:
        raise DataError(f"reading {source}, line {reader.line_num}", f"not CSV: {error}") from error


def _parquet(path: Path, source: str) -> Iterator[RawRow]:
    import pyarrow  # heavy, and only such files need it
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"reading {source}", f"not Parquet: {str(error).splitlines()[0]}") from error
    for number, values in enumerate(table.to_pylist()):
        yield RawRow(values, source, number)


def _hub(source: str) -> Iterator[RawRow]:
    import datasets  # heavy, and only such sources need it
    from datasets.exceptions import DatasetNotFoundError

    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except (ValueError, DatasetNotFoundError) as error:
        raise DataError(
            f"reading {source}", str(error).splitlines()[0], allowed="hub:NAME:SPLIT; without SPLIT: train"
        ) from error
    for number, values in enumerate(rows):
        yield RawRow(dict(values), source, number)


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = line[error.start : error.start + 4]
        raise DataError(
            where,
            f"byte {bad[0]:#04x} at position {error.start} is not UTF-8",
            allowed="UTF-8",
            hint="convert the file",
        ) from error
