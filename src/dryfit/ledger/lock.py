"""The lock file that makes one process the writer of a study; the kernel frees it when the process dies."""

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dryfit.settings.errors import StudyBusyError
from dryfit.settings.files import is_at, open_regular

_GLANCES = 10
_GLANCE_S = 0.02


class StudyLock:
    """Lock of a study, held while it is entered. Its file holds the id of the process that has it.

    Raises:
        StudyBusyError: On entering, if another live process holds it.
        FileError: Something else than a regular file stands at its path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        self._fd = _held(self._path, waits=True)
        if self._fd is None:
            raise busy(self._path.parent, lock_owner(self._path))
        try:
            _sign(self._fd)
        except OSError:  # a full disk: whoever goes on after that must not keep the lock
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def keep(self) -> None:
        """Make the file again where somebody has deleted or replaced it, so that others see who runs the study.

        Where another process has locked the new file, nothing happens: the ledger's own lock keeps it out.
        """
        if self._fd is None or is_at(self._fd, self._path):
            return
        again = _held(self._path, waits=False)
        if again is not None:
            os.close(self._fd)
            self._fd = again
            _sign(again)

    def _release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _held(path: Path, *, waits: bool) -> int | None:
    """Open and lock the file at a path; None where another process holds it."""
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT, allowed="the lock, a regular file")
        if not locked(fd, waits=waits):
            os.close(fd)
            return None
        if is_at(fd, path):
            return fd
        os.close(fd)  # it was deleted before we had it: nobody else would find this lock


def _sign(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def locked(fd: int, *, waits: bool = True) -> bool:
    """Take the lock of an open file; False if another process holds it.

    Args:
        fd: The open file.
        waits: Wait as long as :func:`lock_owner` holds the lock to look whose it is.
    """
    for left in reversed(range(_GLANCES if waits else 1)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(_GLANCE_S)
        else:
            return True
    return False


def lock_owner(path: Path) -> int | None:
    """Return the id of the process that holds a study's lock; None if none does. Needs no permission to write.

    Raises:
        FileError: Something else than a regular file stands at the path.
    """
    try:
        fd = open_regular(path, allowed="the lock, a regular file")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isascii() and text.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


def busy(folder: Path, owner: int | None) -> StudyBusyError:
    """Return the error of a process that finds another one at work on its study."""
    return StudyBusyError(
        f"opening the study in {folder}",
        f"process {owner or 'unknown'} is running it",
        hint=f"wait for it, or stop it with `dryfit stop {folder}`",
    )
