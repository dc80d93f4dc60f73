"""Options, arguments and standard streams that commands share."""

import io
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from dryfit.settings.text import printable

if TYPE_CHECKING:
    from dryfit.documents.document import Document


# Standard streams of a command: escape control and unencodable characters; survive a closed pipe or a full disk.


class SafeStream:
    """A text stream that escapes control characters, and goes on without a reader or room on the disk.

    A study is worth more than what is printed of it: once a write has failed (a closed pipe, a full disk, a closed
    terminal), all that follows is dropped, and the command ends with the exit status that it would have had.

    Args:
        stream: The stream to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._broken = False

    def write(self, text: str) -> int:
        """Write a text, as far as that is possible."""
        self.write_raw(printable(text))
        return len(text)

    def write_raw(self, text: str) -> None:
        """Write a text as it is, with the styles that it holds."""
        if not self._broken:
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.stream.encoding or "ascii"
                self.write_raw(text.encode(encoding, "backslashreplace").decode(encoding))
            except (OSError, ValueError):  # ValueError: the stream was closed
                self._give_up()

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on what is buffered, as far as that is possible."""
        if not self._broken:
            try:
                self.stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own."""
        return getattr(self.stream, name)

    def _give_up(self) -> None:
        """Drop everything from now on, what the stream still buffers too: Python flushes it at its end."""
        self._broken = True
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)


class RawStream(io.TextIOBase):
    """The way past the escapes of a :class:`SafeStream`, for what has been escaped before it was styled."""

    def __init__(self, safe: SafeStream) -> None:
        self._safe = safe

    def write(self, text: str, /) -> int:
        """Write a text with the control characters that it holds."""
        self._safe.write_raw(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._safe.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._safe.stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._safe.stream.fileno()


@contextmanager
def safe_streams() -> Generator[None, None, None]:
    """Make stdout and stderr safe within this block.

    A standard stream that the parent has closed becomes the null device: the next file that is opened, a ledger
    perhaps, must not get its number and all that is printed.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (
            cast(TextIO, SafeStream(stream if stream is not None else nowhere))  # pyright: ignore[reportUnnecessaryComparison]
            for stream in before
        )
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before


SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study file.")
]
TrialsOption = Annotated[int | None, typer.Option("--trials", min=1, help="The study's total of trials.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY_DIR", help="A study's folder, or its study.toml.")]


def number_or_text(text: str) -> int | str:
    """Return a whole number that is written in digits as a number, any other text as it is."""
    return int(text) if text.isascii() and text.isdigit() else text


def answer(result: object, *, as_json: bool, document: "Document | None" = None) -> None:
    """Print the answer of a command: as one JSON object, or as a document.

    Args:
        document: What is shown of it; None: what the module of the answer says.
    """
    from dryfit.documents.command_output import show
    from dryfit.documents.document import document_of, json_text

    if as_json:
        sys.stdout.write(json_text(result) + "\n")
    else:
        show(document_of(result) if document is None else document)


def notes(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line of progress on stderr, or ignores it if ``quiet``."""

    def on_note(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    return on_note
