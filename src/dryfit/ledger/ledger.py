"""The ledger, a study's one durable record: append-only, one writer, one fsync per event, a torn tail truncated.

Where it was taken away under its writer, what was learned since is kept beside it.
"""

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from dryfit.ledger.events import EVENT, Event
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import InternalError, LedgerError, StudyBusyError
from dryfit.settings.files import is_at, open_regular, reading, sync_path, whole_lines
from dryfit.settings.text import LineTail

# The lock file that makes one process the writer of a study; the kernel frees it when the process dies.


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


_KEPT_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20


class RecentLines:
    """The last lines that a process has written to the ledger, up to 1 MiB."""

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
    """Save this process's events of a study in a file beside the ledger, and return the error about it.

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
    except (ValueError, AttributeError, RecursionError):
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
        with reading(path) as file:
            yield from _parse(path, whole_lines(file, path))
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
    """The ledger for its one writer.

    The file itself is locked while it is open, so that there are no two writers even where the study's lock file was
    deleted. Each write, and :meth:`check`, make sure that the file at the path still is the one that is open.

    Args:
        path: The file; created if absent.
        apply: Called with every existing event, in order, and with each one appended later.
        clock: Unix time in seconds.

    Raises:
        LedgerError: The file cannot be read.
        FileError: It is no regular file.
        StudyBusyError: Another process has it open to write.
    """

    def __init__(self, path: Path, *, apply: Callable[[Event], None], clock: Callable[[], float] = time.time) -> None:
        self._apply = apply
        self._clock = clock
        self._path = path
        self._recent = RecentLines()
        self._size = self._next = 0
        existed = path.exists()
        self._fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, allowed="the ledger, a regular file")
        self._folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with ExitStack() as stack:
            stack.callback(self.close)
            if not locked(self._fd) or not is_at(self._fd, path):
                raise busy(path.parent, lock_owner(StudyLayout(path.parent).lock))
            if not existed:
                sync_path(path.parent)
            self._replay()
            stack.pop_all()

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
            LedgerError: As :meth:`check`.
            InternalError: The event does not follow those before it; the ledger is as it was before.
        """
        self.check()
        placed = event.model_copy(update={"seq": self._next, "at": self._clock()})
        line = placed.model_dump_json().encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                os.write(self._fd, line[written:])
            os.fsync(self._fd)
        except OSError:
            self._truncate()
            raise
        self._recent.add(line)
        if os.fstat(self._fd).st_size != self._size + len(line):  # changed between the check and the write
            self._take_back(line)
            self.check()
        try:
            self._apply(placed)
        except LedgerError as error:  # nobody could read the ledger any more
            self._truncate()
            raise InternalError(f"writing {self._path}", f"{event.type}: {error.found}") from error
        self._size += len(line)
        self._next += 1
        return placed

    def check(self) -> None:
        """Make sure that the file at the path is still this one, as it was last written. Cheap: two stats.

        Raises:
            LedgerError: It was deleted, renamed, replaced or changed. What only this process knew is in a file beside.
        """
        if not is_at(self._fd, self._path) or os.fstat(self._fd).st_size != self._size:
            raise lost_ledger(self._path, self._fd, self._folder_fd, self._size, self._recent)

    def close(self) -> None:
        """Close the file, which frees its lock."""
        os.close(self._fd)
        os.close(self._folder_fd)

    def _replay(self) -> None:
        with reading(self._path) as file:
            for event in _parse(self._path, self._counted(whole_lines(file, self._path))):
                self._apply(event)
                self._next += 1
        self._truncate()

    def _counted(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._size += len(line)
            yield line

    def _truncate(self) -> None:
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    def _take_back(self, line: bytes) -> None:
        """Remove a line from the end of a file that is no longer ours to write."""
        begin = os.fstat(self._fd).st_size - len(line)
        if begin >= 0 and os.pread(self._fd, len(line), begin) == line:
            os.ftruncate(self._fd, begin)
