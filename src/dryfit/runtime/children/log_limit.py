"""Keeps a child's log from filling the disk: of a long one, the beginning and the end stay."""

import ctypes
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.errors import FileError
from dryfit.core.regular_files import open_regular

MOST_BYTES = 8 * 2**20
"""Size up to which a log is left alone."""

HEAD_BYTES = 2**20
TAIL_BYTES = 3 * 2**20
_BLOCK_BYTES = 2**20
_PUNCH_HOLE_AND_KEEP_SIZE = 0x02 | 0x01  # linux/falloc.h: FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE


@dataclass(slots=True)
class LogLimit:
    """Keeps the size of one log in bounds.

    The child writes its log itself, so a log outlives the control process and loses no line to a kill. While it is
    written, nothing may be moved in it: only the disk space of its middle is given back, which no writer notices.
    """

    path: Path
    _freed_until: int = HEAD_BYTES

    def trim(self) -> None:
        """Give back the disk space of the middle while the child runs (Linux, on file systems that can do that)."""
        size = self._size()
        if size - self._freed_until <= MOST_BYTES - HEAD_BYTES:
            return
        until = (size - TAIL_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        with suppress(OSError, FileError):
            _free(self.path, self._freed_until, until)
            self._freed_until = until

    def settle(self) -> None:
        """Cut the middle out once the child has ended, and say so in its place."""
        size = self._size()
        if size <= MOST_BYTES:
            return
        # In place, since a full disk may have no room for a copy; the old end goes last, so a kill here loses no line.
        with suppress(OSError, FileError), os.fdopen(open_regular(self.path, os.O_RDWR), "r+b") as file:
            file.seek(size - TAIL_BYTES)
            tail = file.read()
            file.seek(HEAD_BYTES)
            cut = size - HEAD_BYTES - len(tail)
            file.write(b"\n[dryfit: %d bytes of this log are left out here]\n" % cut + tail)
            file.truncate()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def _free(path: Path, begin: int, end: int) -> None:
    """Give back the disk space of a range of a file; its size stays, and the range reads as zeros.

    Raises:
        OSError: The platform or the file system cannot do that.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has fallocate")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = open_regular(path, os.O_WRONLY)
    try:
        mode = ctypes.c_int(_PUNCH_HOLE_AND_KEEP_SIZE)
        if libc.fallocate(ctypes.c_int(fd), mode, ctypes.c_int64(begin), ctypes.c_int64(end - begin)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(fd)
