"""Users' text files: finding them, and decoding their lines as UTF-8."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from dryfit.core.errors import DataError

_MARK = "\ufeff"


def existing_file(source: str, *, allowed: str) -> Path:
    """Return the path of an existing file.

    Args:
        source: The user's path; ``~`` is the home folder.
        allowed: What is allowed, for the error.

    Raises:
        DataError: There is no such file; the nearest name in its folder is suggested.
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
