"""Users' text files: finding them, and reading their lines and cells, bounded in length, as UTF-8."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from dryfit.core.errors import DataError
from dryfit.core.text.words import did_you_mean

_MARK = "\ufeff"
MOST_LINE_BYTES: Final = 2**26
"""Bytes of a line, at most: a file without ends of lines must not fill the memory."""
MOST_CELL_CHARS: Final = 2**24
"""Characters of a CSV cell, at most; the standard library's own limit is 131 072."""


def existing_file(source: str, *, allowed: str) -> Path:
    """Return the path of an existing file.

    Args:
        source: The user's path; ``~`` is the home folder.
        allowed: What is allowed, for the error.

    Raises:
        DataError: There is no such file; the nearest name in its folder is suggested.
    """
    if "\0" in source:
        raise DataError(f"reading {source!a}", "no path has a NUL character", allowed=allowed)
    path = Path(source).expanduser()
    if path.is_file():
        return path
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() and not path.is_dir() else []
    raise DataError(
        f"reading {source}",
        "it is a folder" if path.is_dir() else "there is no such file",
        allowed=allowed,
        hint=did_you_mean(path.name, names, "check the path", str(path.parent / "{}")),
    )


def decoded(line: bytes, where: str) -> str:
    """Decode a line as UTF-8.

    Args:
        line: A line of a file.
        where: What is being read, for the error: ``reading rows.csv, line 3``.

    Raises:
        DataError: It is not UTF-8.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            where,
            f"byte {line[error.start]:#04x} at position {error.start} is not UTF-8",
            allowed="UTF-8",
            hint="convert the file",
        ) from error


def without_mark(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines without the byte order mark that some programs write first."""
    for first in lines:
        yield first.removeprefix(_MARK)
        break
    yield from lines


def bounded_lines(file: BinaryIO, source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, numbered from 1, with their ends.

    Raises:
        DataError: A line is longer than ``MOST_LINE_BYTES``.
    """
    number = 1
    while line := file.readline(MOST_LINE_BYTES + 1):
        if len(line) > MOST_LINE_BYTES:
            raise DataError(
                f"reading {source}, line {number}", "it is too long", f"lines of at most {MOST_LINE_BYTES} bytes"
            )
        yield number, line
        number += 1


def csv_reader(file: BinaryIO, source: str) -> Any:
    """Return a strict reader of CSV, by :mod:`csv`, whose cells have at most ``MOST_CELL_CHARS`` characters.

    Reading raises :class:`csv.Error` where it is no CSV, and :class:`DataError` where it is no UTF-8.
    """
    csv.field_size_limit(MOST_CELL_CHARS)
    lines = (decoded(line, f"reading {source}, line {number}") for number, line in bounded_lines(file, source))
    return csv.reader(without_mark(lines), strict=True)


def check_names(names: Iterable[str], source: str) -> None:
    """Refuse columns of one name: a row by name would silently keep the last.

    Raises:
        DataError: A name is there twice.
    """
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise DataError(f"reading {source}", f"column {twice[0]!a} is there twice", "different names")
