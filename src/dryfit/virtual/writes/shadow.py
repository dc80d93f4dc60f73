"""A view of the file system in which everything that a script writes lies in a shadow folder.

A path is resolved to its *key*, the absolute path without links that it has in the view. A key is looked up in the
shadow first (the shadow folder with the key below it), then in the real file system, unless it or a folder above it
was removed in the view. What is changed is copied to the shadow before. Nothing real is ever changed.
"""

import errno
import fcntl
import hashlib
import io
import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Final

_NAMES: Final = (
    *("stat", "lstat", "access", "readlink", "listdir", "scandir", "statvfs", "chdir", "getcwd", "getcwdb", "open"),
    *("mkdir", "rename", "replace", "remove", "unlink", "rmdir", "link", "symlink", "mkfifo", "mknod"),
    *("truncate", "utime", "chmod", "lchmod", "chown", "lchown", "chflags"),
    *("setxattr", "removexattr", "getxattr", "listxattr"),
)
REAL: Final = SimpleNamespace(io_open=io.open, **{name: getattr(os, name) for name in _NAMES if hasattr(os, name)})
"""Functions of ``os`` and ``io`` as they were before any of them was replaced; a system may lack some."""

_MOST_KNOWN: Final = 10_000
"""Folders of which is remembered whether they are links."""
_MOST_LINKS: Final = 40
"""Symbolic links that a path may go through, as on Linux."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """What is not in a file of tensors.

    Attributes:
        bytes: That would be there besides those that are.
        values: Real tensors by name, where the file itself could not keep them.
    """

    bytes: int
    values: Mapping[str, Any] = field(default_factory=dict)


class Shadow:
    """The view.

    Args:
        folder: The shadow folder; made if it is not there.
        free: Folders (or files) in which the script may write as it is.
    """

    def __init__(self, folder: Path, free: Iterable[Path]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = str(folder.resolve())
        self.free = tuple({str(root.resolve()) for root in free})
        self.gone: set[str] = set()
        """Keys that are not there any more as they really are: removed, moved away, or made anew since."""
        self.aliases: dict[str, str] = {}
        """Keys of files that are empty in the shadow: their content is what really is at this path."""
        self.notes: dict[str, Unwritten] = {}
        """What is not in the files of tensors that the script wrote; it moves with them."""
        self.buffers: dict[tuple[int, bytes], int] = {}
        """By length and hash, contents that tensors were saved to in memory, and the bytes that these lack."""
        self.removed: dict[str, int] = {}
        """The bytes that files of tensors would have had which were removed again."""
        self._links: dict[str, str | None] = {}
        """Where the folders that paths went through lead, until anything in the view may have made it otherwise."""
        self._local = threading.local()
        self._changed = False
        self._untouched_ns = REAL.stat(self.folder).st_mtime_ns

    @property
    def is_used(self) -> bool:
        """Whether anything was written or removed, by a forked process too: until then all is as it really is."""
        if not self._changed:
            self._changed = REAL.stat(self.folder).st_mtime_ns != self._untouched_ns
        return self._changed

    @property
    def is_busy(self) -> bool:
        """Whether this thread is within a function that already knows where it reads and writes."""
        return getattr(self._local, "depth", 0) > 0

    @contextmanager
    def as_asked(self) -> Iterator[None]:
        """Within, the functions of ``os`` do what they are asked: paths are already the right ones."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    @contextmanager
    def as_opened(self) -> Iterator[None]:
        """Within, the guard trusts this thread: a function of the script's own opens a file, by ``os.open``."""
        before, self._local.trusted = self.is_trusted, True
        try:
            yield
        finally:
            self._local.trusted = before

    @property
    def is_trusted(self) -> bool:
        """Whether what this thread opens was looked at already."""
        return self.is_busy or getattr(self._local, "trusted", False)

    def is_free(self, key: str) -> bool:
        """Whether the script may write there as it is."""
        return any(key == root or key.startswith(root.rstrip("/") + "/") for root in self.free)

    def resolve(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        """Return the key of a path.

        Args:
            path: Text, bytes or :class:`os.PathLike`.
            dir_fd: An open folder that a relative path begins at.
            follow: Whether a link at its end is followed.

        Raises:
            OSError: Too many links.
        """
        text = os.fsdecode(path)
        if not text.startswith("/"):
            base = self.cwd() if dir_fd is None else self.unshadowed(path_of(dir_fd))
            text = f"{base}/{text}"
        todo = _parts(self.unshadowed(text))
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
                continue
            done.append(part)
            if not todo and not follow:
                break
            target = self._link("/" + "/".join(done), is_last=not todo)
            if target is None:
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
            done.pop()
            target = self.unshadowed(target)
            if target.startswith("/"):
                done.clear()
            todo += _parts(target)
        return "/" + "/".join(done)

    def unshadowed(self, path: str) -> str:
        """Return what a path within the shadow folder stands for; any other as it is."""
        if path == self.folder or path.startswith(self.folder + "/"):
            return path[len(self.folder) :] or "/"
        return path

    def cwd(self) -> str:
        """Return the current folder in the view."""
        return self.unshadowed(REAL.getcwd())

    def shadow(self, key: str) -> str:
        """Return where a key lies in the shadow."""
        return self.folder + key

    def is_gone(self, key: str) -> bool:
        """Whether what really is at a key is hidden."""
        return bool(self.gone) and (key in self.gone or any(str(at) in self.gone for at in PurePosixPath(key).parents))

    def shown(self, key: str) -> str:
        """Return the path under which a key is found: in the shadow or really; nothing is there where neither is."""
        if self.is_free(key):
            return key
        if key in self.aliases:
            return self.aliases[key]
        shadow = self.shadow(key)
        return shadow if _is_there(shadow) or self.is_gone(key) else key

    def exists(self, key: str) -> bool:
        """Whether there is anything at a key."""
        return _is_there(self.shown(key))

    def is_folder(self, key: str) -> bool:
        """Whether there is a folder at a key."""
        shown = self.shown(key)
        return _is_there(shown) and stat.S_ISDIR(REAL.lstat(shown).st_mode)

    def is_plain(self, key: str) -> bool:
        """Whether a folder has what it really has."""
        return self.is_free(key) or not (_is_there(self.shadow(key)) or self.gone)

    def names(self, key: str) -> list[str]:
        """Return what a folder has in the view.

        Raises:
            OSError: It is no folder.
        """
        shadow = self.shadow(key)
        in_shadow = not self.is_free(key) and _is_there(shadow)
        names = dict.fromkeys(REAL.listdir(shadow)) if in_shadow else {}
        if not in_shadow or (not self.is_gone(key) and _is_there(key)):
            real = REAL.listdir(key if in_shadow else self.shown(key))
            names |= dict.fromkeys(name for name in real if f"{key.rstrip('/')}/{name}" not in self.gone)
        return list(names)

    def to_write(self, key: str, keep: bool) -> str:
        """Return the path at which a key is written: in the shadow, with all folders above it.

        Args:
            key: What is written.
            keep: Whether a file's content is kept: it is copied there first.

        Raises:
            FileNotFoundError: The folder that it is in is not there.
            NotADirectoryError: It is no folder.
        """
        if self.is_free(key):
            return key
        self._make_folders(str(PurePosixPath(key).parent))
        self._changed = True
        self._links.pop(key, None)
        shadow = self.shadow(key)
        if key in self.aliases:
            source = self.aliases.pop(key)
            if keep:
                _copy(source, shadow)
        elif keep and not _is_there(shadow) and not self.is_gone(key) and _is_there(key):
            _copy(key, shadow)
        return shadow

    def unwritten(self, key: str) -> int | None:
        """Return the bytes that a file lacks; None where it lacks none."""
        if key in self.notes:
            return self.notes[key].bytes
        shown = self.shown(key)
        size = REAL.stat(shown).st_size
        if not any(length == size for length, _ in self.buffers):
            return None
        with REAL.io_open(shown, "rb") as file:
            return self.buffers.get((size, hashlib.sha256(file.read()).digest()))

    def drop(self, key: str) -> None:
        """Remove a file or an empty folder in the view."""
        self._links.clear()
        self.aliases.pop(key, None)
        shadow = key if self.is_free(key) else self.shadow(key)
        if _is_there(shadow) and stat.S_ISREG(REAL.lstat(shadow).st_mode):
            unwritten = self.unwritten(key)
            if unwritten is not None:
                self.removed[key] = unwritten + REAL.stat(shadow).st_size
        self.notes.pop(key, None)
        if _is_there(shadow):
            (REAL.rmdir if stat.S_ISDIR(REAL.lstat(shadow).st_mode) else REAL.unlink)(shadow)
        self.hide(key)

    def hide(self, key: str) -> None:
        """Let what really is at a key be there no more."""
        self._links.clear()
        if not self.is_free(key):
            self.gone = {one for one in self.gone if not one.startswith(key + "/")}
            if _is_there(key):
                self.gone.add(key)
            self._changed = True

    def move(self, source: str, target: str) -> None:
        """Let a file or a folder have another key, in the place of what was there."""
        if not self.is_free(source):
            self._bring(source)
        if self.exists(target):
            self.drop(target)
        if self.is_free(target):
            for key in [key for key in self.aliases if _is_within(key, source)]:
                self.to_write(key, keep=True)
        to = self.to_write(target, keep=False)
        with self.as_asked():
            shutil.move(source if self.is_free(source) else self.shadow(source), to)
        self.hide(source)
        self._links.clear()
        _rename(self.aliases, source, target)
        _rename(self.notes, source, target)

    def borrow(self, source: str, target: str) -> None:
        """Let a new file have the content of another one, without a copy, until it is written."""
        shown = self.shown(source)
        to = self.to_write(target, keep=False)
        with REAL.io_open(to, "wb"):
            pass
        self.aliases[target] = shown

    def _bring(self, key: str) -> None:
        """Have all of a file or folder in the shadow, without a copy of its files."""
        shadow = self.shadow(key)
        if self.is_folder(key):
            self._make_folders(key)
            for name in self.names(key):
                self._bring(f"{key}/{name}")
        elif not _is_there(shadow):
            if stat.S_ISREG(REAL.lstat(key).st_mode):
                self.borrow(key, key)
            else:
                self.to_write(key, keep=True)

    def _make_folders(self, key: str) -> None:
        if not stat.S_ISDIR(REAL.stat(self.shown(key)).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
        missing: list[str] = []
        while key != "/" and not _is_there(self.shadow(key)):
            missing.append(key)
            key = str(PurePosixPath(key).parent)
        for one in reversed(missing):
            REAL.mkdir(self.shadow(one))

    def _link(self, key: str, is_last: bool) -> str | None:
        """Return where a link leads; None: it is none. What is in ``/proc`` are no paths."""
        if key in self._links:
            return self._links[key]
        try:
            target = None if key.startswith("/proc/") else REAL.readlink(self.shown(key))
        except OSError:
            target = None
        if not is_last and len(self._links) < _MOST_KNOWN:
            self._links[key] = target
        return target


def path_of(descriptor: int) -> str:
    """Return the path of an open file or folder."""
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return REAL.readlink(f"/proc/self/fd/{descriptor}")


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _rename(table: dict[str, Any], source: str, target: str) -> None:
    """Let what a table has of a file or a folder be at another key."""
    for key in [key for key in table if _is_within(key, source)]:
        table[target + key[len(source) :]] = table.pop(key)


def _is_within(key: str, folder: str) -> bool:
    return key == folder or key.startswith(folder + "/")


def _is_there(path: str) -> bool:
    try:
        REAL.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _copy(source: str, target: str) -> None:
    """Copy a file with its mode and times, or a link; of a folder only itself."""
    facts = REAL.lstat(source)
    if stat.S_ISDIR(facts.st_mode):
        REAL.mkdir(target)
    elif stat.S_ISLNK(facts.st_mode):
        REAL.symlink(REAL.readlink(source), target)
    elif stat.S_ISREG(facts.st_mode):
        with REAL.io_open(source, "rb") as read, REAL.io_open(target, "wb") as written:
            while block := read.read(1 << 22):
                written.write(block)
        REAL.chmod(target, stat.S_IMODE(facts.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        REAL.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
