"""A study at hand in a notebook or a script: its trials as a data frame, its report, and a view that follows it."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from dryfit.api.files import layout_of
from dryfit.api.reports import report_page, write_report
from dryfit.core.errors import ConfigError, LedgerError, MachineError
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.jobs.rehearsal import RehearsalAnswer
from dryfit.core.text.shown import Shown, shown_by
from dryfit.reporting.document import Document, Table, document_of
from dryfit.reporting.story import TrialStory, trial_story
from dryfit.reporting.summary import StudySummary, owner_text, status_document, summarise
from dryfit.reporting.trials import trial_rows, trials_table
from dryfit.reporting.watch import StudyFollower, Watched
from dryfit.store.ledger import read_ledger
from dryfit.store.lock import lock_owner
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState
from dryfit.study.loop.session import folded, read_study
from dryfit.study.planning.plan_requests import SpacePlan

_EVERY_S: Final = 1.0


class StudyReport(Shown):
    """A report that was written.

    Attributes:
        file: The page, with all figures.
        document: Its verdict and first tables.
    """

    def __init__(self, file: Path, document: Document) -> None:
        self.file = file
        self.document = document

    def __fspath__(self) -> str:
        """Return the page's path."""
        return str(self.file)

    def __repr__(self) -> str:
        return f"StudyReport({str(self.file)!r})"


class Study(Shown):
    """A study, running or not; every look reads what its folder says now. Nothing is locked or written.

    Args:
        folder: Its folder, or its study file.

    Raises:
        LedgerError: There is no study in the folder, or it cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self._layout = layout_of(folder)
        read_study(self._layout)

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r})"

    @property
    def folder(self) -> Path:
        """Where everything lies."""
        return self._layout.folder

    @property
    def state(self) -> StudyState:
        """All that its ledger says."""
        return read_study(self._layout)

    @property
    def summary(self) -> StudySummary:
        """The study in numbers, as ``dryfit status --json`` prints it."""
        return summarise(self.state, self._layout)

    @property
    def trials(self) -> Any:
        """A pandas data frame with a row for each trial; the columns are those of ``dryfit export --to csv``.

        Raises:
            MachineError: pandas is not installed.
        """
        try:
            pandas: Any = import_module("pandas")
        except ImportError as error:
            hint = "pip install pandas; without it: `dryfit.open_study(folder).trials`, or `dryfit export --to csv`"
            raise MachineError("making a data frame of the trials", "pandas is not installed", hint=hint) from error
        heads, rows = trial_rows(self.state)
        return pandas.DataFrame(rows, columns=heads).set_index("number")

    def trial(self, number: int) -> TrialStory:
        """Return everything known of one trial.

        Raises:
            ConfigError: There is no such trial.
        """
        events = read_ledger(self._layout.ledger)
        state = folded(events, self._layout)
        return trial_story(state, trial_of(state, number).number, events, self._layout)

    def report(self, file: Path | str | None = None) -> StudyReport:
        """Write the report, as :func:`dryfit.write_report` does."""
        written = write_report(self.folder, file)
        head, *rest = document_of(report_page(self._layout)).blocks
        return StudyReport(written, Document((head, f"with figures: {written}", *rest)))

    def watch(self, *, every_s: float = _EVERY_S) -> None:
        """Show how far it is, in place, until no process runs it. Interrupting ends the watching, not the study.

        Args:
            every_s: Seconds between two readings.
        """
        if not self._layout.ledger.exists():
            raise LedgerError(f"watching the study in {self.folder}", "there is none (no ledger.jsonl)")
        follower = StudyFollower(self._layout)
        update, close = _place()
        try:
            for watched in follower.readings(every_s):
                update(watched)
        except KeyboardInterrupt:
            pass
        finally:
            close()


def trial_of(state: StudyState, number: int) -> TrialState:
    """Return a trial by its number.

    Raises:
        ConfigError: There is no such trial.
    """
    if number < len(state.trials):
        return state.trials[number]
    raise ConfigError("looking for a trial", f"there is no trial {number}", f"0 to {len(state.trials) - 1}")


def _place() -> tuple[Callable[[Watched], None], Callable[[], None]]:
    """Return what shows a reading in the place of the one before, and what ends that."""
    display = _notebook_display()
    if display is not None:
        handle = display(Document(("reading the study",)), display_id=True)
        return (lambda watched: handle.update(document_of(watched))), (lambda: None)
    out = Console(file=sys.stdout)
    if not out.is_terminal or out.is_dumb_terminal:
        return (lambda watched: out.print(str(document_of(watched)), markup=False, soft_wrap=True)), (lambda: None)
    live = Live("", console=out, auto_refresh=False)
    live.start()
    return (lambda watched: live.update(str(document_of(watched)), refresh=True)), live.stop


def _notebook_display() -> Any | None:
    """Return IPython's function that shows an object; None where this process is no kernel of a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    try:
        return import_module("IPython.display").display
    except ImportError:  # a shell that only looks like IPython's
        return None


_MOST_TRIALS: Final = 50
"""Rows of a table of trials, the last ones."""


@document_of.register
def _(study: Study) -> Document:
    """Return how far a study is, with its last trials."""
    status = status_document(study.summary, owner_text(lock_owner(layout_of(study.folder).lock)))
    table = trials_table(study.state)
    more = len(table.rows) > _MOST_TRIALS
    caption = f"the last {_MOST_TRIALS} of {len(table.rows)} trials" if more else ""
    shown = (caption, Table(table.heads, table.rows[-_MOST_TRIALS:])) if table.rows else ()
    return Document((*status.blocks, *shown))


@document_of.register
def _(report: StudyReport) -> Document:
    return report.document


for _shown in (StudySummary, PlanAnswer, SpacePlan, RehearsalAnswer, TrialStory, StudyReport, Study):
    shown_by(_shown, document_of)
