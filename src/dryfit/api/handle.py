"""A study at hand in a notebook or a script: its trials as a data frame, its report, and a view that follows it."""

import sys
import time
from collections.abc import Callable, Iterator
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
from dryfit.reporting.document import Card
from dryfit.reporting.notebook import (
    page_card,
    plan_card,
    rehearsal_card,
    space_card,
    story_card,
    study_card,
    summary_card,
    watched_card,
)
from dryfit.reporting.story import TrialStory, trial_story
from dryfit.reporting.summary import StudySummary, summarise
from dryfit.reporting.trials import trial_rows
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
        card: Its verdict and first tables.
    """

    def __init__(self, file: Path, card: Card) -> None:
        self.file = file
        self.card = card

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
        return StudyReport(written, page_card(report_page(self._layout), str(written)))

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
            for watched in _readings(follower, every_s):
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


def _readings(follower: StudyFollower, every_s: float) -> Iterator[Watched]:
    """Read a study again and again; the last reading is the first that finds no process running it."""
    while True:
        watched = follower.look()
        yield watched
        if not watched.running:
            return
        time.sleep(every_s)


def _place() -> tuple[Callable[[Watched], None], Callable[[], None]]:
    """Return what shows a reading in the place of the one before, and what ends that."""
    display = _notebook_display()
    if display is not None:
        handle = display(Card("reading the study"), display_id=True)
        return (lambda watched: handle.update(watched_card(watched))), (lambda: None)
    out = Console(file=sys.stdout)
    if not out.is_terminal or out.is_dumb_terminal:
        return (lambda watched: out.print(watched_card(watched).text(), markup=False, soft_wrap=True)), (lambda: None)
    live = Live("", console=out, auto_refresh=False)
    live.start()
    return (lambda watched: live.update(watched_card(watched).text(), refresh=True)), live.stop


def _notebook_display() -> Any | None:
    """Return IPython's function that shows an object; None where this process is no kernel of a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    try:
        return import_module("IPython.display").display
    except ImportError:  # a shell that only looks like IPython's
        return None


def _register() -> None:
    shown_by(StudySummary, summary_card)
    shown_by(PlanAnswer, plan_card)
    shown_by(SpacePlan, space_card)
    shown_by(RehearsalAnswer, rehearsal_card)
    shown_by(TrialStory, story_card)
    shown_by(StudyReport, lambda report: report.card)
    shown_by(Study, lambda study: study_card(study.summary, study.state, lock_owner(layout_of(study.folder).lock)))


_register()
