"""Files of text that somebody else wrote: whether they are there, and their lines as UTF-8."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from dryfit.core.errors import DataError

_MARK = "\ufeff"


def existing_file(source: str, *, allowed: str) -> Path:
    """The file that is meant.

    Args:
        source: As it was given; ``~`` is the user's home.
        allowed: What may be given, for the error.

    Raises:
        DataError: There is none; the nearest name in its folder is named.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    raise DataError(
        f"reading {source}",
        "it is a folder" if path.is_dir() else "there is no such file",
        allowed=allowed,
        hint=f"did you mean {path.parent / near[0]}?" if near and not path.is_dir() else "check the path",
    )


def decoded(line: bytes, where: str) -> str:
    """Bytes as text.

    Args:
        line: Of a file.
        where: For the error: ``reading rows.csv, line 3``.

    Raises:
        DataError: They are not UTF-8.
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
    """The lines without the byte order mark that some programs begin a file with."""
    for first in lines:
        yield first.removeprefix(_MARK)
        break
    yield from lines
