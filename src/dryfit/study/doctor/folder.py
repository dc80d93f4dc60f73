"""What a folder's file system can do, tried with temporary files."""

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
    """Facts about a folder, or about the nearest existing one above it.

    Attributes:
        folder: The folder that was tried.
        file_system: Its kind: ``ext4``, ``nfs4``; empty where unknown.
        free_bytes: What this user may still write.
        not_writable: Why no file could be written; empty if one could.
        not_locked: Why locks do not work; empty if a second lock was refused.
        not_durable: Why a rename or an fsync failed; empty if both worked.
    """

    folder: Path
    file_system: str
    free_bytes: int
    not_writable: str = ""
    not_locked: str = ""
    not_durable: str = ""


def nearest_folder(path: Path) -> Path:
    """Return the folder itself if it exists, else the nearest one above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def look_at_folder(path: Path) -> FolderFacts:
    """Try a folder's writes, locks and durable renames."""
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
    """Return why :class:`dryfit.store.ledger.StudyLock` would not keep a second process out here; empty if it does."""
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
    """Return why a file cannot be replaced in one step that survives a power cut; empty if it can."""
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
    """Return the kind of the file system that a folder is on: that of the longest mount point above it."""
    found, kind = "", ""
    with suppress(OSError, psutil.Error):
        real = str(folder.resolve())
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint.rstrip("/") + "/"
            if f"{real}/".startswith(point) and len(point) >= len(found):
                found, kind = point, mount.fstype
    return kind
