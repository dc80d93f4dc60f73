"""Entries of a folder in the view of :mod:`dryfit.virtual.writes.shadow`, as :func:`os.scandir` returns them."""

import os
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from dryfit.virtual.writes.shadow import REAL, Shadow


class Entry:
    """An entry of a folder in the view: as :class:`os.DirEntry`."""

    def __init__(self, view: Shadow, folder: str, name: str, base: Any) -> None:
        self._view = view
        self._key = f"{folder.rstrip('/')}/{name}"
        as_bytes = isinstance(base, bytes)
        self.name = os.fsencode(name) if as_bytes else name
        text = os.fsdecode(base)
        path = name if not text else text + name if text.endswith("/") else f"{text}/{name}"
        self.path = os.fsencode(path) if as_bytes else path

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return what is known of it."""
        key = self._view.resolve(self._key, follow=follow_symlinks)
        return (REAL.stat if follow_symlinks else REAL.lstat)(self._view.shown(key))

    def inode(self) -> int:
        """Return its number."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a plain file."""
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        """Whether it is a link."""
        return stat.S_ISLNK(self._mode(False))

    def is_junction(self) -> bool:
        """Whether it is a junction, which only Windows has."""
        return False

    def _mode(self, follow: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow).st_mode
        except OSError:
            return 0


class Entries:
    """Entries of a folder: as what :func:`os.scandir` returns."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> "Entries":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())
