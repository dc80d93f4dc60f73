"""Hidden states of rows on disk: one file for each (weights, rows, number format), which all trials read.

Rows are read at their offsets instead of being mapped. The kernel keeps their pages once for all processes all the
same, they do not count as the trial's own memory, and a file that somebody cuts short is a short read and no signal
that ends the process. Each row has a checksum: what is damaged counts as absent.

Dimension suffixes: ``R`` rows of the file, ``B`` rows of a batch, ``L`` tokens, ``D`` encoder width.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
import xxhash

from dryfit.core.errors import FileError
from dryfit.core.regular_files import open_regular
from dryfit.core.text.units import gib

FOLDER: Final = "frozen"
"""Folder of these files in a study's cache."""

_SUFFIX: Final = ".states"
_LOCK: Final = "lock"
_WHOLE: Final = b"dryfit-1"
_POLL_S: Final = 0.2
_KEPT_FREE_BYTES: Final = 2**30


class NoStatesError(Exception):
    """There is no file of hidden states, for a reason that the user is told."""


@dataclass(frozen=True, slots=True)
class StatesLayout:
    """Where each row lies in a file.

    Attributes:
        index: Number of each row in the file, by the digest of its tokens; in the order of the file.
        starts_R: Tokens before each row, int64, and a last entry: all tokens.
        width: Numbers of each token.
        dtype: Their number format.
    """

    index: Mapping[bytes, int]
    starts_R: np.ndarray
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Size of one token's states."""
        return self.width * self.dtype.itemsize

    @property
    def checks_at(self) -> int:
        """Where the checksums begin."""
        return int(self.starts_R[-1]) * self.token_bytes

    @property
    def size_bytes(self) -> int:
        """Size of a whole file."""
        return self.checks_at + 8 * len(self.index) + len(_WHOLE)


class StatesFile:
    """A whole file, open for reading. It stays readable if it is removed meanwhile.

    Args:
        path: The file.
        layout: Where each row lies in it.

    Raises:
        FileError: Something else than a file stands there.
        OSError: It cannot be read.
        ValueError: It is not whole.
    """

    def __init__(self, path: Path, layout: StatesLayout) -> None:
        self.layout = layout
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)
        try:
            tail = _read_at(self._file.fileno(), layout.checks_at, layout.size_bytes - layout.checks_at)
            if os.fstat(self._file.fileno()).st_size != layout.size_bytes or tail[-len(_WHOLE) :] != _WHOLE:
                raise ValueError("it is not whole")
        except (OSError, ValueError):
            self._file.close()
            raise
        self._checks_R = np.frombuffer(tail[: -len(_WHOLE)], dtype=np.uint64)
        with suppress(OSError):
            os.utime(path)  # the files used longest ago make room first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def states(self, digests: Sequence[bytes], length: int) -> torch.Tensor | None:
        """Return the states of some rows, (B, ``length``, D), zeros behind each row's end; None if one is not there.

        Args:
            digests: Of their tokens, as in the layout.
            length: Tokens of the longest of them, or more.
        """
        layout = self.layout
        rows = [layout.index[digest] for digest in digests if digest in layout.index]
        if len(rows) < len(digests):
            return None
        states_BLD = torch.zeros((len(rows), length, layout.width), dtype=layout.dtype)
        bytes_BN = states_BLD.view(torch.uint8).reshape(len(rows), -1).numpy()
        for place, row in enumerate(rows):
            first, last = (int(layout.starts_R[row + step]) * layout.token_bytes for step in (0, 1))
            into = memoryview(bytes_BN[place])[: last - first]
            if not _fill(self._file.fileno(), into, first):
                return None
            if xxhash.xxh3_64_intdigest(into) != int(self._checks_R[row]):
                return None
        return states_BLD


def _fill(fd: int, into: memoryview, at: int) -> bool:
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done:]], at + done)
        except OSError:
            return False
        if count == 0:
            return False
        done += count
    return True


def _read_at(fd: int, at: int, count: int) -> bytes:
    into = bytearray(count)
    return bytes(into) if _fill(fd, memoryview(into), at) else b""


@dataclass(frozen=True, slots=True)
class StatesFolder:
    """The files of a study, written by one process at a time.

    Attributes:
        folder: Made where it is missing.
        limit_bytes: All files together; those used longest ago make room.
    """

    folder: Path
    limit_bytes: int

    def path(self, key: str) -> Path:
        """Return the file of a key."""
        return self.folder / f"{key}{_SUFFIX}"

    def existing(self, key: str, layout: StatesLayout) -> StatesFile | None:
        """Return a whole file; None where there is none."""
        try:
            return StatesFile(self.path(key), layout)
        except (FileError, OSError, ValueError):
            return None

    @contextmanager
    def writing(self, beat: Callable[[], None], stopped: Callable[[], bool]) -> Iterator[None]:
        """Wait to be the only writer of the folder; the kernel gives the lock of a dead process to the next.

        Args:
            beat: Called while waiting, as a sign of life.
            stopped: Whether this process was asked to stop.

        Raises:
            NoStatesError: It was asked to stop, or the file system has no locks.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.fdopen(open_regular(self.folder / _LOCK, os.O_WRONLY | os.O_CREAT), "wb")
        except (FileError, OSError) as error:
            raise NoStatesError(f"its folder cannot be written: {error}") from error
        with lock:
            while not _locked(lock.fileno()):
                beat()
                if stopped():
                    raise NoStatesError("the trial was asked to stop")
                time.sleep(_POLL_S)
            yield

    def write(self, key: str, layout: StatesLayout, states: Iterator[torch.Tensor]) -> StatesFile:
        """Write a file under a temporary name and give it its own; to be called within :meth:`writing`.

        Args:
            key: Its key.
            layout: Where each row lies.
            states: Of each row (its tokens, D), in the layout's order.

        Raises:
            NoStatesError: The size limit or the disk has no room for it.
        """
        temporary = self.folder / f".{key}.tmp"
        try:
            self._make_room(layout.size_bytes)
            with temporary.open("wb") as file:
                checks: list[int] = []
                for one in states:
                    content = one.contiguous().view(torch.uint8).numpy().data
                    checks.append(xxhash.xxh3_64_intdigest(content))
                    file.write(content)
                file.write(np.array(checks, dtype=np.uint64).tobytes() + _WHOLE)
            temporary.replace(self.path(key))
            return StatesFile(self.path(key), layout)
        except (FileError, OSError, ValueError) as error:
            raise NoStatesError(f"writing them failed: {error}") from error
        finally:
            with suppress(OSError):  # a folder stands there: that was said
                temporary.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> None:
        if size_bytes > self.limit_bytes:
            raise NoStatesError(f"they take {gib(size_bytes)}, and execution.frozen_cache is {gib(self.limit_bytes)}")
        for left in self.folder.glob(".*.tmp"):  # of writers that were killed: there is no other now
            left.unlink(missing_ok=True)
        files = sorted((about.st_mtime_ns, about.st_size, path) for path, about in _files(self.folder))
        excess_bytes = sum(size for _, size, _ in files) + size_bytes - self.limit_bytes
        for _, size, path in files:
            if excess_bytes <= 0:
                break
            path.unlink(missing_ok=True)
            excess_bytes -= size
        free_bytes = shutil.disk_usage(self.folder).free
        if size_bytes + _KEPT_FREE_BYTES > free_bytes:
            raise NoStatesError(f"they take {gib(size_bytes)}, and the disk has {gib(free_bytes)} left")


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoStatesError(f"its folder has no locks: {error.strerror or error}") from error
    return True
