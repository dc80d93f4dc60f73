"""Check that a file is still the one whose header was read."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.errors import LoadError

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The state of a file when its header was read.

    Attributes:
        path: The file, as it was named; links are followed.
        device: Number of the file system.
        inode: Number of the file in it.
        size_bytes: Its length.
        mtime_ns: When its content last changed.
    """

    path: Path
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    def compare(self, now: os.stat_result) -> None:
        """Compare with the file's present state.

        Raises:
            LoadError: The file was replaced, has another length, or was written to.
        """
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            what = f"another file took its place (inode {self.inode}, now {now.st_ino})"
        elif now.st_size != self.size_bytes:
            what = f"its size changed from {self.size_bytes} to {now.st_size} bytes"
        elif now.st_mtime_ns != self.mtime_ns:
            what = f"it was written to (mtime {self.mtime_ns} ns, now {now.st_mtime_ns} ns)"
        else:
            return
        raise changed(self.path, what)


@dataclass(frozen=True, slots=True)
class FileGuard:
    """The files that weights came from, as they were when their headers were read.

    Tensors of a mapped file *are* the file: overwritten in place it changes their values, cut short it kills the
    process with SIGBUS. So call :meth:`check` before each use of mapped tensors. What remains: a change between the
    check and the use is not seen, nor one that keeps inode, size and mtime alike (two writes within one tick of the
    file system's clock, or a time put back on purpose). Where that matters, read private copies.
    """

    files: tuple[FileStamp, ...]

    def check(self) -> None:
        """Compare every file with its state when it was read.

        Raises:
            LoadError: One was changed, replaced, cut short or removed.
        """
        for stamp in self.files:
            try:
                now = stamp.path.stat()
            except OSError as error:
                raise changed(stamp.path, f"it cannot be looked at any more ({error.strerror})") from error
            stamp.compare(now)


def open_file(path: Path, doing: str) -> tuple[int, FileStamp]:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        LoadError: There is no such file, it cannot be read, or it is a folder, pipe or device.
    """
    try:
        # Without O_NONBLOCK a pipe in a file's place would hang here.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LoadError(doing, f"{path} cannot be opened ({error.strerror})", "a file that can be read") from error
    now = os.fstat(descriptor)
    if not stat.S_ISREG(now.st_mode):
        os.close(descriptor)
        raise LoadError(doing, f"{path} is no regular file", "a file")
    return descriptor, FileStamp(path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)


def is_lfs_pointer(descriptor: int) -> bool:
    """Whether a file is a git-lfs pointer to a file that was not fetched."""
    return os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER


def changed(path: Path, what: str) -> LoadError:
    """Return the error for a file that changed."""
    return LoadError(
        f"reading weights from {path}",
        f"the file changed since its header was read: {what}",
        allowed="a file that nobody writes to while its weights are in use",
        hint="load again; write new weights to a new file and rename it",
    )
