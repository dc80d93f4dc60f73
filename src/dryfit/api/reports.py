"""Write the HTML report of a study, and export it as CSV or an Optuna storage."""

import errno
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from dryfit.api.files import layout_of
from dryfit.api.models import export_model
from dryfit.config.load import load_study_file
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.jobs.model_folders import is_model, is_study
from dryfit.core.settings.choices import ExportFormat
from dryfit.core.wire import write_text_atomic
from dryfit.reporting.page import MARK, Page, render
from dryfit.reporting.report import build_page
from dryfit.reporting.trials import csv_text
from dryfit.search.mirror.export import export_ledger, is_sqlite, storage_file
from dryfit.store.layout import StudyLayout
from dryfit.store.lock import lock_owner
from dryfit.study.loop.session import read_study

_HEAD_BYTES = 1024


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
    """Return what a report of a study, as it is now, shows.

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
            assert state.created is not None
            export_ledger(layout.ledger, target, study=state.created.name, sqlite=is_sqlite(text))
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


def refuse_foreign(target: Path) -> None:
    """Refuse to replace anything but an earlier report.

    Raises:
        ConfigError: There is something else.
    """
    if not target.exists():
        return
    head = ""
    if target.is_file():
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    if MARK not in head:
        what = "there is a folder" if target.is_dir() else "there is a file that is no report of dryfit"
        raise ConfigError(f"writing the report to {target}", what, "a new file, or an earlier report")


@contextmanager
def writing(target: Path, *, own: bool) -> Generator[None, None, None]:
    """Make the folder of the default file; for any other file it must exist, as a wrong ``-o`` should be an error.

    Raises:
        ConfigError: There is no such folder.
        MachineError: It belongs to somebody else, or cannot be written to at all.
    """
    if not own and not target.parent.is_dir():
        raise ConfigError(f"writing {target}", f"there is no folder {target.parent}", "a folder that is there")
    try:
        target.parent.mkdir(exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        what = error.strerror or str(error)
        raise MachineError(f"writing {target}", what, hint="name a file elsewhere with -o FILE") from error
