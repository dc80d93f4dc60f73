"""The ledger, a study's one durable record: append-only, one writer, one fsync per event, a torn tail truncated."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pydantic import ValidationError

from dryfit.core.errors import LedgerError, StudyBusyError
from dryfit.core.text.tail import LineTail
from dryfit.core.wire import sync_path
from dryfit.store.events import EVENT, Event

_GLANCES = 10
_GLANCE_S = 0.02


class StudyLock:
    """File lock that makes one process the writer of a study. The kernel frees it when the process dies.

    Raises:
        StudyBusyError: On entering, if another live process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _taken(fd):
            os.close(fd)
            raise StudyBusyError(
                f"opening the study in {self._path.parent}",
                f"process {lock_owner(self._path) or 'unknown'} is running it",
                hint=f"wait for it, or stop it with `dryfit stop {self._path.parent}`",
            )
        self._fd = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk: whoever goes on after that must not keep the lock
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _taken(fd: int) -> bool:
    """Take a lock; False if another process holds it for longer than :func:`lock_owner` does to look whose it is."""
    for left in reversed(range(_GLANCES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                time.sleep(_GLANCE_S)
        else:
            return True
    return False


def lock_owner(path: Path) -> int | None:
    """Return the id of the process that holds a study's lock; None if none does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode().strip()
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of a file; a torn last one, or one being written right now, is left out."""
    return (line for line in file if line.endswith(b"\n"))


def _parse(path: Path, lines: Iterable[bytes], first: int = 0) -> Iterator[Event]:
    for index, line in enumerate(lines, first):
        doing = f"reading {path}, line {index + 1}"
        try:
            event = EVENT.validate_json(line)
        except ValidationError as error:
            raise LedgerError(doing, _why_unreadable(line, error), hint=_BACKUP_HINT) from error
        if event.seq != index:
            raise LedgerError(doing, f"event {event.seq} stands where {index} belongs", hint=_BACKUP_HINT)
        yield event


_BACKUP_HINT = "restore the file from a backup, or move the folder aside and start a new study"


def _why_unreadable(line: bytes, error: ValidationError) -> str:
    try:
        version = json.loads(line).get("v")
    except (ValueError, AttributeError):
        return "this is no JSON object"
    if version != 1:
        return f"it has version {version}, this dryfit reads version 1: a newer dryfit wrote it"
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def each_event(path: Path) -> Iterator[Event]:
    """Yield the events of a ledger without taking its lock; a torn tail, or one being written right now, is ignored.

    Raises:
        LedgerError: A line that is not the last cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from _parse(path, _whole_lines(file))
    except FileNotFoundError:
        return


def read_ledger(path: Path) -> list[Event]:
    """Return all events of a ledger; see :func:`each_event`.

    Raises:
        LedgerError: A line that is not the last cannot be read.
    """
    return list(each_event(path))


class LedgerTail:
    """Follows a ledger without taking its lock; each line is read once.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._next = 0
        self._inode: int | None = None

    def began_anew(self) -> bool:
        """Whether the file was replaced, as happens to a study that had no trial yet."""
        try:
            status = self._tail.path.stat()
        except FileNotFoundError:
            return self._inode is not None
        self._inode = status.st_ino if self._inode is None else self._inode
        return status.st_ino != self._inode or status.st_size < self._tail.offset

    def read(self) -> list[Event]:
        """Return every event written since the last call.

        Raises:
            LedgerError: A line cannot be read.
        """
        events = list(_parse(self._tail.path, self._tail.read(), self._next))
        self._next += len(events)
        return events


class Ledger:
    """The ledger for its one writer. Open it only while holding a :class:`StudyLock`.

    Args:
        path: The file; created if absent.
        apply: Called with every existing event, in order, and with each one appended later.
        clock: Unix time in seconds.

    Raises:
        LedgerError: The file cannot be read.
    """

    def __init__(self, path: Path, *, apply: Callable[[Event], None], clock: Callable[[], float] = time.time) -> None:
        self._apply = apply
        self._clock = clock
        existed = path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not existed:
            sync_path(path.parent)
        self._size = self._next = 0
        with path.open("rb") as file:
            for event in _parse(path, self._counted(_whole_lines(file))):
                apply(event)
                self._next += 1
        if self._size < os.fstat(self._fd).st_size:
            self._truncate()

    @property
    def size_bytes(self) -> int:
        """Length of the durable part of the file."""
        return self._size

    def append(self, event: Event) -> Event:
        """Write one event durably, then apply it.

        Returns:
            The event with its index and time.

        Raises:
            OSError: It could not be written; the ledger is as it was before.
        """
        placed = event.model_copy(update={"seq": self._next, "at": self._clock()})
        line = placed.model_dump_json().encode() + b"\n"
        try:
            written = os.pwrite(self._fd, line, self._size)
            if written != len(line):
                os.pwrite(self._fd, line[written:], self._size + written)
            os.fsync(self._fd)
        except OSError:
            self._truncate()
            raise
        self._size += len(line)
        self._next += 1
        self._apply(placed)
        return placed

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _counted(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._size += len(line)
            yield line

    def _truncate(self) -> None:
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
