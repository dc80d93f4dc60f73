"""Files that anybody may have replaced, and clean-up after errors."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar

from dryfit.settings.errors import ConfigError, FileError, MachineError

# Clean-up that never hides the error it runs after.


Exit: TypeAlias = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
"""An exit callback of an exit stack."""


@contextmanager
def first_error_wins(error: BaseException | None) -> Generator[None, None, None]:
    """Clean up after ``error``: a failure in here is added to it as a note; without an error it is raised as usual.

    Args:
        error: The error being raised; None: none.
    """
    try:
        yield
    except Exception as trouble:  # whatever it is, the first error is raised
        if error is None:
            raise
        error.add_note(f"cleaning up failed as well: {type(trouble).__name__}: {trouble}")


def closing(close: Callable[[], object]) -> Exit:
    """Return an exit callback that calls ``close`` without hiding the error being raised."""

    def leave(_kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        with first_error_wins(error):
            close()

    return leave


# Open files that anybody may have replaced: regular files only, without blocking.


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing ends with where there is no room: a full disk, a quota, the shell's limit on a file's size."""

_BLOCK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 26

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_KIND_ERRORS = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EOPNOTSUPP)
"""What opening something else than a regular file can end with: a link, a folder, a FIFO, a socket."""


def open_regular(path: Path, flags: int = os.O_RDONLY, *, allowed: str = "a regular file", links: bool = False) -> int:
    """Open a file and return its descriptor; one that is created can be read by everybody.

    Args:
        path: The file. Folders on the way to it may be symbolic links.
        flags: As of :func:`os.open`.
        allowed: What belongs at this path, for the error.
        links: Whether the file itself may be a symbolic link, as those that a user names.

    Raises:
        FileError: Something else than a regular file stands there. A FIFO is not waited for.
        OSError: It cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW), 0o644)
    except OSError as error:
        if error.errno in _KIND_ERRORS:
            raise _wrong_kind(path, (path.stat() if links else path.lstat()).st_mode, allowed) from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _wrong_kind(path, mode, allowed)
    return fd


def _wrong_kind(path: Path, mode: int, allowed: str) -> FileError:
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
    return FileError(f"opening {path}", f"it is {kind}", allowed, hint="move it away")


@contextmanager
def reading(path: Path, *, links: bool = False) -> Generator[BinaryIO, None, None]:
    """Open a file to read its bytes, as :func:`open_regular` does."""
    with os.fdopen(open_regular(path, links=links), "rb") as file:
        yield file


def read_bounded(path: Path, most_bytes: int, *, links: bool = False) -> bytes:
    """Return a file's content.

    Raises:
        FileError: It is no regular file, or larger than ``most_bytes``.
        OSError: It cannot be read.
    """
    data = bytearray()
    with reading(path, links=links) as file:
        # Block by block: one read of so many bytes would ask for that much memory first, whatever the file has.
        while len(data) <= most_bytes and (block := file.read(min(_BLOCK_BYTES, most_bytes + 1 - len(data)))):
            data += block
    if len(data) > most_bytes:
        raise FileError(f"reading {path}", f"it is larger than {most_bytes} bytes", f"at most {most_bytes} bytes")
    return bytes(data)


def whole_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the complete lines of an open file, with their ends; a torn last one, or one being written, is left out.

    Raises:
        FileError: A line, or what stands where one should be, is longer than 64 MiB.
    """
    while (line := file.readline(_MOST_LINE_BYTES + 1)).endswith(b"\n"):
        yield line
    if len(line) > _MOST_LINE_BYTES:
        allowed = f"lines of at most {_MOST_LINE_BYTES} bytes"
        raise FileError(f"reading {path}", f"it has no end of a line in {_MOST_LINE_BYTES} bytes", allowed)


def contents(path: Path, most_bytes: int = 1 << 28) -> bytes | None:
    """Return the content of a file of a study's folder; None if it is no regular file, too large, or unreadable."""
    try:
        return read_bounded(path, most_bytes)
    except (OSError, FileError):
        return None


@contextmanager
def appending(path: Path) -> Generator[BinaryIO, None, None]:
    """Open a log to append to it, as :func:`open_regular` does; where something else stands, it goes nowhere."""
    try:
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except FileError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    with os.fdopen(fd, "ab") as file:
        yield file


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one that stands at a path: it may have been deleted, renamed or replaced."""
    try:
        there = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(fd), there)


# Files that are written atomically, and messages in them.


_MOST_BYTES = 1 << 28


class Message(Protocol):
    """What can be written as JSON: a model of pydantic, or a record."""

    def model_dump_json(self) -> str:
        """Return it as JSON."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: str | bytes, /) -> Any:
        """Read it from JSON."""
        ...


MessageT = TypeVar("MessageT", bound=Message)


def sync_path(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make everything below a folder survive a power cut."""
    for path in (*folder.rglob("*"), folder):
        if path.is_file() or path.is_dir():  # a pipe would be waited for, and a link may lead nowhere
            sync_path(path)


def empty_beside(folder: Path) -> Path:
    """Make an empty folder beside one, to be filled and renamed to it; what an earlier process left there goes."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


@contextmanager
def publishing(folder: Path) -> Generator[Path, None, None]:
    """Write a folder whole or not at all: the block fills the folder that it gets, which is then renamed, on disk.

    An existing folder of the name is replaced. Where the block fails, what was written is removed.
    """
    temporary = empty_beside(folder)
    try:
        yield temporary
        sync_tree(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs its space back
    sync_path(folder.parent)


def copy_folder(source: Path, target: Path, copy: Callable[[Path, Path], object] | None = None) -> None:
    """Copy a folder's files. Links stay links; pipes and sockets are left out, as nobody is at their other end.

    Args:
        source: The folder.
        target: Where to; made if absent.
        copy: Copies one file; None: its bytes and times.
    """
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        place = target / path.name
        if path.is_symlink():
            place.symlink_to(path.readlink())
        elif path.is_dir():
            copy_folder(path, place, copy)
        elif path.is_file():
            (copy or shutil.copy2)(path, place)


def write_text_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a text as UTF-8, as :func:`write_bytes_atomic` does."""
    write_bytes_atomic(path, text.encode("utf-8"), durable=durable)


def write_bytes_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically: a reader sees the old or the new content, also after a kill at any moment.

    Args:
        durable: Survive a power cut too (two fsyncs); not needed if the content can be made again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_path(path.parent)


def write_model(path: Path, model: Message, *, durable: bool = True) -> None:
    """Write a message as one JSON object, atomically."""
    write_text_atomic(path, model.model_dump_json(), durable=durable)


def read_model(path: Path, cls: type[MessageT]) -> MessageT | None:
    """Read a message; None if there is no file.

    Raises:
        ValueError: The file holds something else.
        FileError: It is no regular file, or has no bounds.
    """
    try:
        text = read_bounded(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    return cls.model_validate_json(text)


def read_cached(path: Path, cls: type[MessageT]) -> MessageT | None:
    """Read what a cache holds; None where that is absent, damaged, unreadable or of another version."""
    try:
        return read_model(path, cls)
    except (OSError, FileError, ValueError):
        return None


def write_cached(path: Path, model: Message) -> None:
    """Write into a cache; one that cannot be written to stays as it is, and its content is made again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, model, durable=False)


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
