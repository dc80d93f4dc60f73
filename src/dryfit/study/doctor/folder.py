"""What a folder's file system can do: tried out with files of our own, which are gone afterwards."""

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dryfit.core.wire import sync_path


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder, or the nearest one above it that is there.

    Attributes:
        folder: Where we looked.
        file_system: Its kind: ``ext4``, ``nfs4``; empty where unknown.
        free_bytes: What this user may still write.
        not_writable: Why no file could be written; empty where one could.
        not_locked: Why a lock is no lock; empty where a second taker was refused.
        not_durable: Why a rename or an fsync failed; empty where both went through.
    """

    folder: Path
    file_system: str
    free_bytes: int
    not_writable: str = ""
    not_locked: str = ""
    not_durable: str = ""


def nearest_folder(path: Path) -> Path:
    """The folder itself where it is there, or else the nearest one above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def look_at_folder(path: Path) -> FolderFacts:
    """Try out what dryfit asks of a folder: writing, locks, and renames that last."""
    folder = nearest_folder(path)
    free_bytes, kind = shutil.disk_usage(folder).free, _file_system(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".dryfit-doctor-", dir=folder) as own:
            return FolderFacts(
                folder, kind, free_bytes, not_locked=_not_locked(Path(own)), not_durable=_not_durable(Path(own))
            )
    except OSError as error:
        return FolderFacts(folder, kind, free_bytes, not_writable=_said(error))


def _said(error: OSError) -> str:
    return error.strerror or errno.errorcode.get(error.errno or 0, type(error).__name__)


def _not_locked(folder: Path) -> str:
    """Why :class:`dryfit.store.ledger.StudyLock` would not keep a second process out here."""
    path = folder / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "two holders got the same lock"
    except OSError as error:
        return _said(error)
    finally:
        os.close(first)
        os.close(second)


def _not_durable(folder: Path) -> str:
    """Why a file cannot be replaced in one step that survives a power cut."""
    old, new = folder / "old", folder / "new"
    try:
        old.write_text("old", encoding="utf-8")
        with new.open("w", encoding="utf-8") as file:
            file.write("new")
            file.flush()
            os.fsync(file.fileno())
        new.replace(old)
        sync_path(folder)
        found = old.read_text(encoding="utf-8")
    except OSError as error:
        return _said(error)
    return "" if found == "new" else f"after a rename the file holds {found!r}"


def _file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on: of the mount points above it, the longest."""
    found, kind = "", ""
    with suppress(OSError, psutil.Error):
        real = str(folder.resolve())
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint.rstrip("/") + "/"
            if f"{real}/".startswith(point) and len(point) >= len(found):
                found, kind = point, mount.fstype
    return kind
