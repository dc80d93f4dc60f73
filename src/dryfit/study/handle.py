"""A study at hand: its report, its export, its trials as a data frame, and a view that follows it."""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from dryfit.documents.document import Document, document_of
from dryfit.documents.live_study import StudyFollower, Watched
from dryfit.documents.pages import Page, refuse_foreign, render
from dryfit.documents.report import build_page
from dryfit.documents.report_tables import csv_text, trial_rows, trials_table
from dryfit.documents.story import TrialStory, trial_story
from dryfit.documents.summary import StudySummary, owner_text, status_document, summarise
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import lock_owner, read_ledger
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.search.optuna_follower import export_ledger, is_sqlite, storage_file
from dryfit.settings.choices import ExportFormat
from dryfit.settings.errors import ConfigError, LedgerError, MachineError
from dryfit.settings.files import write_text_atomic, writing
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.text import Shown, Table, shown_by
from dryfit.settings.training_messages import is_model, is_study
from dryfit.study.arguments import layout_of
from dryfit.study.models import export_model
from dryfit.study.planning import SpacePlan
from dryfit.study.session import folded, read_study


def write_report(folder: Path | str, file: Path | str | None = None) -> Path:
    """Write an HTML page about a study, running or not; it needs no network and no other file.

    Args:
        folder: The study's folder.
        file: What to write; ``report/index.html`` in the study's folder by default. An earlier report is replaced.

    Returns:
        The file.

    Raises:
        LedgerError: There is no study in the folder.
        ConfigError: The file is there and is no report, or its folder is not there.
        MachineError: It cannot be written.
    """
    layout = layout_of(folder)
    read_study(layout)
    target = Path(file).expanduser().absolute() if file is not None else layout.report
    refuse_foreign(target)
    page = report_page(layout)
    with writing(target, own=file is None):
        write_text_atomic(target, render(page), durable=False)
    return target


def report_page(layout: StudyLayout) -> Page:
    """Return the content of a study's current report.

    Raises:
        LedgerError: There is no study in the folder.
    """
    running = lock_owner(layout.lock) is not None
    return build_page(read_study(layout), _config(layout), layout, running=running, now_s=time.time())


def export(
    folder: Path | str,
    to: ExportFormat | str,
    file: Path | str | None = None,
    *,
    trust: bool = False,
    on_note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a study, running or not, or a trained model in a format of other programs.

    Args:
        folder: The study's folder; with ``"transformers"`` and ``"transformers-encoder"`` a model's.
        to: ``"csv"`` or ``"optuna"``; of a model ``"transformers"``, or its encoder alone: ``"transformers-encoder"``.
        file: What to write; in the study's folder ``report/trials.csv`` or ``report/optuna.journal`` by default. For
            Optuna a name ending in ``.db``, ``.sqlite`` or ``.sqlite3``, or a ``sqlite:///PATH``, gives a database.
            Of a model it is a new folder; by default beside the model's, if that does not lie in a study:
            ``NAME-transformers`` or ``NAME-encoder``.
        trust: Run code that comes with the model.
        on_note: Called with what a model's folder cannot say.

    Returns:
        The file, or the folder.

    Raises:
        LedgerError: There is no study in the folder.
        LoadError: There is no model in the folder; if models lie deeper in it, they are named.
        ConfigError: The format is unknown or another folder's, the file is already there, or no class of transformers
            computes what the model does; what could be exported is said.
        MachineError: It cannot be written.
    """
    wanted = _format(to)
    if wanted.of_model:
        return export_model(folder, file, encoder_alone=wanted is ExportFormat.ENCODER, trust=trust, on_note=on_note)
    doing, layout = f"exporting {folder} to {wanted}", layout_of(folder)
    if is_model(layout.folder) and not is_study(layout.folder):
        allowed = f"{ExportFormat.TRANSFORMERS} or {ExportFormat.ENCODER}"
        raise ConfigError(doing, "it is a model's folder, and no study's", allowed, "give the folder of the study")
    if trust:
        raise ConfigError(doing, "trust is given, and no model is loaded", "trust with a model's folder")
    state = read_study(layout)
    default = layout.report.with_name("optuna.journal" if wanted is ExportFormat.OPTUNA else "trials.csv")
    text = str(file) if file is not None else str(default)
    target = (storage_file(text) if wanted is ExportFormat.OPTUNA else Path(text)).expanduser().absolute()
    if target.exists():
        raise ConfigError(f"exporting to {target}", "there is such a file", "a new one", "remove it, or give -o FILE")
    with writing(target, own=file is None):
        if wanted is ExportFormat.CSV:
            write_text_atomic(target, csv_text(state), durable=False)
        else:
            export_ledger(layout.ledger, target, sqlite=is_sqlite(text))
    return target


def _format(to: ExportFormat | str) -> ExportFormat:
    try:
        return ExportFormat(to)
    except ValueError:
        raise ConfigError("exporting", f"the format {to!r} is unknown", ", ".join(ExportFormat)) from None


def _config(layout: StudyLayout) -> StudyConfig | ConfigError:
    """Return the configuration of the last run, or the error where it cannot be read."""
    try:
        return load_study_file(layout.frozen_file).config
    except ConfigError as error:
        return error


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
    """A study, running or not; every access reads its folder again. Nothing is locked or written.

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


for _shown in (StudySummary, PlanAnswer, SpacePlan, TrialStory, StudyReport, Study):
    shown_by(_shown, document_of)
