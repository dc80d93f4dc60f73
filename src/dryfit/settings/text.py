"""Texts: units of memory, short lists of names, users' lines and cells, tails of growing files."""

import csv
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeVar

from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.files import reading, whole_lines

# Text for messages: short lists of names, and text that UTF-8 can encode.


def few(names: Iterable[str], most: int = 5) -> str:
    """Return the first names and a count of the rest; unprintable names are escaped."""
    every = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", written: str = "{}") -> str:
    """Return ``did you mean KNOWN?`` of the name that is nearest.

    Args:
        name: What was given.
        known: What there is.
        otherwise: The hint where none is near.
        written: How the name is written in the hint.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {written.replace('{}', near[0], 1)}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def brief(value: object, most: int = 200) -> str:
    """Return a value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: file names may contain bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


_OBEYED = (
    *range(0x20),  # C0: ESC, BEL, carriage return ...
    *range(0x7F, 0xA0),  # DEL, and C1: a control sequence in one character
    *(
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    ),  # line ends, directions of text
    *range(0xD800, 0xE000),  # no characters: bytes of file names that are not UTF-8
)
_ESCAPES = {
    number: f"\\u{number:04x}" if number > 0x7E else f"\\x{number:02x}"  # in JSON only the former are left unescaped
    for number in _OBEYED
    if chr(number) not in "\n\t"
}


def printable(text: str) -> str:
    r"""Return a text that no terminal obeys: control characters but tab and line feed are escaped, ESC as ``\x1b``.

    JSON keeps its meaning.
    """
    return text.translate(_ESCAPES)


# Parsing and formatting of amounts of memory.


_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_AMOUNT = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([KMGT]i?B|B)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: ``14GiB``, ``512 MiB``, ``80GB``.

    Raises:
        ConfigError: It is not an amount above zero.
    """
    match = _AMOUNT.fullmatch(text.strip())
    size_bytes = int(Fraction(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size_bytes <= 0:
        raise ConfigError("reading an amount of memory", f"{text!r}", "a number with its unit: 24GiB, 512MiB, 80GB")
    return size_bytes


def gib(size_bytes: int) -> str:
    """Format an amount in GiB with one decimal, or in MiB below one GiB."""
    if abs(size_bytes) < 2**30:
        return f"{size_bytes / 2**20:.0f} MiB"
    return f"{size_bytes / 2**30:.1f} GiB"


# Tables of text, and the format of their numbers.


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows of text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number_text(value: float | None) -> str:
    """Format a metric; a dash for None."""
    return "-" if value is None else f"{value:.4f}"


# Reading of a file that another process appends to.


@dataclass(slots=True)
class LineTail:
    """Reads the lines appended to a file since the last call; an incomplete last line is left for later."""

    path: Path
    offset: int = 0

    def read(self) -> Iterator[bytes]:
        """Yield every complete new line, without its line end.

        Raises:
            FileError: Something else than a regular file of lines stands at the path.
        """
        try:
            with reading(self.path) as file:
                file.seek(self.offset)
                for line in whole_lines(file, self.path):
                    self.offset += len(line)
                    yield line[:-1]
        except FileNotFoundError:
            return


# Objects with a readable form in notebooks and in print; the package that knows the form registers it.


class Looks(Protocol):
    """What an object looks like."""

    def html(self) -> str:
        """Return it for a notebook, every text escaped."""
        ...

    def text(self) -> str:
        """Return it for a terminal."""
        ...


class Printer(Protocol):
    """The part of IPython's printer that is used."""

    def text(self, text: str, /) -> None:
        """Print a text."""
        ...


_MAKERS: dict[type, Callable[[Any], Looks]] = {}

ShownT = TypeVar("ShownT", bound="Shown")


class Shown:
    """An object that notebooks show as HTML, and that prints as lines and tables.

    The packages of these objects do not know how anything looks; whoever imports :mod:`dryfit.study.functions` has it
    registered.
    """

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        looks = self._looks()
        return None if looks is None else looks.html()

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))

    def __str__(self) -> str:
        looks = self._looks()
        return repr(self) if looks is None else looks.text()

    def _looks(self) -> Looks | None:
        make = _MAKERS.get(type(self))
        return None if make is None else make(self)


def shown_by(kind: type[ShownT], make: Callable[[ShownT], Looks]) -> None:
    """Register the displayed form of a class's objects."""
    _MAKERS[kind] = make


# Users' text files: finding them, and reading their lines and cells, bounded in length, as UTF-8.


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
