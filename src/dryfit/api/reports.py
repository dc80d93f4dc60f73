"""Write the HTML report of a study, and export it as CSV or an Optuna storage."""

import errno
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dryfit.api.files import layout_of
from dryfit.config.load import load_study_file
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.wire import write_text_atomic
from dryfit.reporting.data.csv_file import csv_text
from dryfit.reporting.data.formats import ExportFormat
from dryfit.reporting.html.build import build_page
from dryfit.reporting.html.page import MARK, render
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
    state = read_study(layout)
    target = Path(file).expanduser().absolute() if file is not None else layout.report
    refuse_foreign(target)
    page = build_page(
        state,
        _config(layout),
        layout,
        running=lock_owner(layout.lock) is not None,
        now_s=time.time(),
    )
    with writing(target, own=file is None):
        write_text_atomic(target, render(page), durable=False)
    return target


def export(folder: Path | str, to: ExportFormat | str, file: Path | str | None = None) -> Path:
    """Write a study, running or not, in a format of other programs.

    Args:
        folder: The study's folder.
        to: ``"csv"`` or ``"optuna"``.
        file: What to write; in the study's folder ``report/trials.csv`` or ``report/optuna.journal`` by default. For
            Optuna a name ending in ``.db``, ``.sqlite`` or ``.sqlite3``, or a ``sqlite:///PATH``, gives a database.

    Returns:
        The file.

    Raises:
        LedgerError: There is no study in the folder.
        ConfigError: The format is unknown, or the file is already there.
        MachineError: It cannot be written.
    """
    layout = layout_of(folder)
    state = read_study(layout)
    wanted = _format(to)
    text = str(file) if file is not None else str(layout.report.with_name(wanted.file_name))
    target = (storage_file(text) if wanted is ExportFormat.OPTUNA else Path(text)).expanduser().absolute()
    if target.exists():
        raise ConfigError(f"exporting to {target}", "there is such a file", "a new one", "remove it, or give -o FILE")
    with writing(target, own=file is None):
        match wanted:
            case ExportFormat.CSV:
                write_text_atomic(target, csv_text(state), durable=False)
            case ExportFormat.OPTUNA:
                assert state.created is not None
                export_ledger(layout.ledger, target, study=state.created.name, sqlite=is_sqlite(text))
    return target


def _format(to: ExportFormat | str) -> ExportFormat:
    try:
        return ExportFormat(to)
    except ValueError:
        raise ConfigError("exporting a study", f"the format {to!r} is unknown", " or ".join(ExportFormat)) from None


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
