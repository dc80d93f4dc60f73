"""What this process reads from files, as the loader does it; forks that it makes count on by themselves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


class Reads:
    """Bytes that were read, by file."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int]] = []  # appended to by several threads at once

    def add(self, descriptor: int, size_bytes: int) -> None:
        """So many bytes were read through a descriptor."""
        self._found.append((os.fstat(descriptor).st_ino, size_bytes))

    def bytes_of(self, *paths: Path) -> int:
        """Bytes that were read of files."""
        wanted = {path.stat().st_ino for path in paths}
        return sum(size_bytes for file, size_bytes in self._found if file in wanted)

    def all_bytes(self) -> int:
        """Bytes that were read of whatever file."""
        return sum(size_bytes for _, size_bytes in self._found)

    def clear(self) -> None:
        """Begin anew."""
        self._found.clear()


@contextmanager
def counted() -> Iterator[Reads]:
    """Count what is read: weights, headers and indexes."""
    reads = Reads()
    preadv, pread, opened = os.preadv, os.pread, os.fdopen

    def counted_preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        reads.add(descriptor, count)
        return count

    def counted_pread(descriptor: int, count: int, offset: int) -> bytes:
        found = pread(descriptor, count, offset)
        reads.add(descriptor, len(found))
        return found

    def counted_open(descriptor: int, *args: Any, **kwargs: Any) -> Any:
        reads.add(descriptor, os.fstat(descriptor).st_size)
        return opened(descriptor, *args, **kwargs)

    with mock.patch.multiple(os, preadv=counted_preadv, pread=counted_pread, fdopen=counted_open):
        yield reads
