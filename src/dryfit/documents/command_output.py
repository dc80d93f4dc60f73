"""How commands print: results on stdout, everything else on stderr; without colours where that is no terminal."""

import errno
import os
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from dryfit.documents.command_options import RawStream, SafeStream
from dryfit.documents.document import Document, Line, duration_text
from dryfit.documents.findings import finding_lines
from dryfit.settings.errors import DryfitError, InternalError, MachineError
from dryfit.settings.secrets import redacted, secrets_of
from dryfit.settings.text import Table, printable
from dryfit.settings.trial import Outcome
from dryfit.study.machine_checks import Finding, Status
from dryfit.study.next_step import End

if TYPE_CHECKING:
    from dryfit.study.studies import StudyRun, TuneResult

_HINTS = {
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "the system has no more open files",
    errno.EAGAIN: "raise the limit on processes (`ulimit -u`)",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.ENOSPC: "free some room on the disk",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a folder on a file system that can be written to",
    errno.EACCES: "let its owner give you the right to it (chmod, chown), or choose another place",
    errno.EPERM: "let its owner give you the right to it (chmod, chown), or choose another place",
    errno.ENOENT: "go to a folder that exists",
}

_OUTCOME_STYLES = {str(Outcome.COMPLETE): "green", str(Outcome.PRUNED): "yellow", str(Outcome.FAILED): "red"}
_STATUS_STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "red"}

_SENTENCES = {
    End.DONE: "done",
    End.NO_IMPROVEMENT: "done: no better trial for as long as study.patience allows",
    End.TOO_MANY_FAILURES: "stopped: too many trials failed in a row (see `dryfit show`)",
    End.SAME_FAILURE: "stopped: its trials fail in the same way (see `dryfit show`)",
    End.BAD_DATA: "stopped: no trial could use the data (see `dryfit show`)",
    End.REFUSED: "stopped: nothing fits the device",
    End.MAX_HOURS: "stopped: study.max_hours is used up",
    End.STOPPED: "stopped",
    End.INTERRUPTED: "interrupted",
    End.PAUSED: "paused",
    End.BROKEN: "stopped by an internal error",
}


class SafeConsole(Console):
    """A console that escapes control characters in texts before it adds those of its styles."""

    def __init__(self, stream: TextIO, **settings: Any) -> None:
        super().__init__(file=cast(TextIO, RawStream(stream)) if isinstance(stream, SafeStream) else stream, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with every text escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console(*, stderr: bool = False) -> SafeConsole:
    """Return a console that honours ``NO_COLOR`` and ``CI`` and does not wrap lines."""
    stream = sys.stderr if stderr else sys.stdout
    plain = bool(os.environ.get("CI")) or not stream.isatty()
    return SafeConsole(stream, no_color=plain or None, force_terminal=False if plain else None, soft_wrap=True)


def show(document: Document) -> None:
    """Print a document on stdout, what is no part of the result on stderr."""
    for block in document.blocks:
        if isinstance(block, Table):
            _show_table(block)
        else:
            line = block if isinstance(block, Line) else Line(block)
            console(stderr=line.aside).print(Text(line.text, style=line.style))


def _show_table(table: Table) -> None:
    """Print a table, aligned on a terminal, tab-separated elsewhere."""
    out = console()
    if not out.is_terminal:
        for row in (table.heads, *table.rows):
            sys.stdout.write("\t".join(row) + "\n")
        return
    rich_table = RichTable(*table.heads, box=None, header_style="bold", pad_edge=False)
    for row in table.rows:
        rich_table.add_row(*row, style=_OUTCOME_STYLES.get("".join(row[1:2])))
    out.print(rich_table)


def print_error(error: DryfitError) -> None:
    """Print an error on stderr, without secrets."""
    message = "\n".join(redacted(str(error), secrets_of(os.environ)).splitlines())
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), message))


def print_bug(error: BaseException) -> None:
    """Print an error of dryfit's own: the traceback, and a request to report it."""
    sys.stderr.write(redacted("".join(traceback.format_exception(error)), secrets_of(os.environ)))
    print_error(InternalError("running this command", f"{type(error).__name__}: {error}", hint="please report it"))


def print_machine_error(error: OSError) -> None:
    """Print an error of the machine or its file system that nothing before could name better."""
    found = (error.strerror or str(error)) + (f": {error.filename}" if error.filename else "")
    print_error(MachineError("running this command", found, hint=_HINTS.get(error.errno or 0, "")))


def print_finding(finding: Finding, *, quiet: bool) -> None:
    """Print one check; with ``quiet``, only one that asks for action."""
    if quiet and finding.status is Status.PASS:
        return
    out = console()
    for line in finding_lines(finding):
        text = Text(line)
        text.stylize(_STATUS_STYLES[finding.status], 0, len(finding.status))
        out.print(text)


def end_document(result: "TuneResult", *, advice_alone: bool = False) -> Document:
    """Return how the session ended, how to go on if trials are left, and what would fit if nothing did."""
    left = "" if result.end.is_final else f"go on with: dryfit resume {result.folder}"
    texts = [result.advice] if advice_alone else [_end_text(result), left, result.advice]
    return Document(tuple(Line(text, aside=True) for text in texts if text))


def _end_text(result: "TuneResult") -> str:
    counts = result.summary.trials
    text = f"{_SENTENCES[result.end]}: {counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed"
    text += f", {counts.refused} refused" if counts.refused else ""
    return f"{text} of {counts.total}, {duration_text(result.summary.wall_s)}"


def run_text(run: "StudyRun") -> str:
    """Return in one line how one of several studies ended."""
    if run.result is not None:
        return f"{'' if run.worked_on else 'before: '}{_end_text(run.result)}"
    if run.error is None:
        return "not begun"
    first = redacted(str(run.error), secrets_of(os.environ)).splitlines()[0]
    return f"could not run: {first}"
