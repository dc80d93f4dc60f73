"""Export a ledger as an Optuna storage in a new file, by the code that mirrors a running study."""

import logging
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from dryfit.core.errors import ConfigError
from dryfit.core.text.tail import LineTail
from dryfit.search.mirror.writer import MirrorStores

_SQLITE_PREFIX = "sqlite:///"
_SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


def storage_file(target: str) -> Path:
    """Return the file meant by a path or a SQLite URL.

    Raises:
        ConfigError: It is the URL of another kind of storage.
    """
    if "://" in target and not target.startswith(_SQLITE_PREFIX):
        raise ConfigError(
            "exporting to Optuna",
            f"{target.partition('://')[0]}:// is no file",
            f"a path, or {_SQLITE_PREFIX}PATH",
            "a running study mirrors itself into any Optuna storage: see search.mirror",
        )
    return Path(target.removeprefix(_SQLITE_PREFIX))


def export_ledger(ledger: Path, file: Path, *, study: str, sqlite: bool) -> None:
    """Write all trials of a ledger into a new storage; the file appears when it is complete.

    Args:
        ledger: The ledger.
        file: What to write; its folder exists.
        study: Name of the study in the storage; each later generation is a study of its own, as in the mirror.
        sqlite: A SQLite database instead of a journal.
    """
    lines = list(LineTail(ledger).read())
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent))
        made = Path(folder) / file.name
        stack.enter_context(_unlogged())
        storage = RDBStorage(f"{_SQLITE_PREFIX}{made}") if sqlite else JournalStorage(JournalFileBackend(str(made)))
        MirrorStores(storage, study, first_line=lines[0]).add(lines)
        if isinstance(storage, RDBStorage):
            storage.engine.dispose()
        made.replace(file)


@contextmanager
def _unlogged() -> Generator[None, None, None]:
    """Drop the line with which Optuna greets each new study; its loggers stay as the user set them."""

    def dropped(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(storage.__module__) for storage in (RDBStorage, JournalStorage)]
    for logger in loggers:
        logger.addFilter(dropped)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(dropped)


def is_sqlite(target: str) -> bool:
    """Whether a path or URL means a SQLite database."""
    return target.startswith(_SQLITE_PREFIX) or target.endswith(_SQLITE_SUFFIXES)
