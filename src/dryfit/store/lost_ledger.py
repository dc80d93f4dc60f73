"""What to do when a study's ledger was deleted, replaced, moved or changed under the process that writes it."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dryfit.core.errors import LedgerError
from dryfit.core.regular_files import is_at, open_regular

_KEPT_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20


class RecentLines:
    """The last lines that a process has written to the ledger, at most a mebibyte of them."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Keep a line, and let the oldest ones go."""
        self._lines.append(line)
        self._bytes += len(line)
        while self._bytes > _KEPT_BYTES:
            self._bytes -= len(self._lines.popleft())

    @property
    def lines(self) -> Sequence[bytes]:
        """The lines, oldest first."""
        return self._lines


def lost_ledger(path: Path, fd: int, folder_fd: int, size_bytes: int, recent: RecentLines) -> LedgerError:
    """Keep what only this process knows of a study in a file beside, and return the error that says so.

    Args:
        path: Where the ledger should be.
        fd: The open ledger, wherever it is by now.
        folder_fd: Its open folder.
        size_bytes: What its writer had written.
        recent: What was written last.

    Returns:
        The error to raise. Nothing is raised where the file cannot be written: the error says that instead.
    """
    doing, folder = f"writing {path}", path.parent
    if not is_at(folder_fd, folder):
        moved = _path_of(folder_fd)
        if moved is not None and is_at(fd, moved / path.name):
            return LedgerError(
                doing,
                f"the study's folder was moved to {moved} while it ran",
                hint=f"nothing is lost: go on with `dryfit tune {moved / 'study.toml'}`",
            )
        folder = folder if folder.is_dir() else folder.parent
    whole = not is_at(fd, path)
    found = "it was changed by another program" if not whole else "it was deleted, replaced or renamed"
    kept = folder / f"ledger-{'kept' if whole else 'recent'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    try:
        _write(kept, _blocks(fd, size_bytes) if whole else recent.lines)
    except OSError as error:
        found = f"{found} while the study ran, and what this run knows could not be kept in {kept}: {error.strerror}"
        return LedgerError(doing, found, "a ledger that only one process writes")
    if whole:
        hint = f"to go on with all that this run knew: mv {kept} {path}; or go on with the file that stands there"
        return LedgerError(doing, f"{found} while the study ran; all of it is kept in {kept}", hint=hint)
    hint = f"the last lines that this run wrote are in {kept}; restore the ledger from a backup that ends before them"
    return LedgerError(doing, f"{found} while the study ran", hint=hint)


def _path_of(folder_fd: int) -> Path | None:
    """Return where an open folder is now; None where the kernel does not say, or it was deleted."""
    with suppress(OSError):
        path = Path(f"/proc/self/fd/{folder_fd}").readlink()
        return path if is_at(folder_fd, path) else None
    return None


def _blocks(fd: int, size_bytes: int) -> Iterator[bytes]:
    """Yield the first bytes of an open file, whatever its position."""
    for offset in range(0, size_bytes, _BLOCK_BYTES):
        yield os.pread(fd, min(_BLOCK_BYTES, size_bytes - offset), offset)


def _write(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a new file, and wait until it is on disk."""
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as target:
        target.writelines(blocks)
        target.flush()
        os.fsync(target.fileno())
