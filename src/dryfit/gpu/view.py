"""A view of the file system in which everything that Python writes lies in a folder of the rehearsal's own.

A path is resolved to its *key*, the absolute path without links that it has in the view. A key is looked up in the
folder first (with the key below it), then in the real file system, unless it or a folder above it was removed in the
view. What is changed is copied before. Nothing real is ever changed.
"""

import errno
import fcntl
import io
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Final

_NAMES: Final = (
    *("stat", "lstat", "access", "readlink", "listdir", "scandir", "statvfs", "chdir", "getcwd", "getcwdb", "open"),
    *("mkdir", "rename", "replace", "remove", "unlink", "rmdir", "link", "symlink"),
    *("truncate", "utime", "chmod", "lchmod", "chown", "lchown", "chflags"),
    *("setxattr", "removexattr", "getxattr", "listxattr"),
)
REAL: Final = SimpleNamespace(io_open=io.open, **{name: getattr(os, name) for name in _NAMES if hasattr(os, name)})
"""Functions of ``os`` and ``io`` as they were before any of them was replaced; a system may lack some."""

_SHARED_MEMORY: Final = "/dev/shm"
_MOST_KNOWN: Final = 10_000
"""Folders of which is remembered whether they are links."""
_MOST_LINKS: Final = 40
"""Symbolic links that a path may go through, as on Linux."""


class View:
    """The view.

    Args:
        folder: Takes what is written.
        free: Folders (or files) in which the script may write as it is.
    """

    def __init__(self, folder: Path, free: Iterable[Path]) -> None:
        self.folder = str(folder.resolve())
        self.free = tuple({str(root.resolve()) for root in free})
        self.gone: set[str] = set()
        """Keys that are not there any more as they really are: removed, moved away, or made anew since."""
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
        """Within, what this thread opens is not judged: a function of the script's own does, by ``os.open``."""
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
        return any(_is_within(key, root) for root in self.free) and not _is_within(key, _SHARED_MEMORY)

    def resolve(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        """Return the key of a path.

        Args:
            path: Text or bytes.
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
        """Return what a path within the folder stands for; any other as it is."""
        return path[len(self.folder) :] or "/" if _is_within(path, self.folder) else path

    def cwd(self) -> str:
        """Return the current folder in the view."""
        return self.unshadowed(REAL.getcwd())

    def is_gone(self, key: str) -> bool:
        """Whether what really is at a key is hidden."""
        return bool(self.gone) and (key in self.gone or any(str(at) in self.gone for at in PurePosixPath(key).parents))

    def shown(self, key: str) -> str:
        """Return the path under which a key is found: in the folder or really; nothing is there where neither is."""
        if self.is_free(key):
            return key
        written = self.folder + key
        return written if is_there(written) or self.is_gone(key) else key

    def exists(self, key: str) -> bool:
        """Whether there is anything at a key."""
        return is_there(self.shown(key))

    def is_folder(self, key: str) -> bool:
        """Whether there is a folder at a key."""
        shown = self.shown(key)
        return is_there(shown) and stat.S_ISDIR(REAL.lstat(shown).st_mode)

    def names(self, key: str) -> list[str]:
        """Return what a folder has in the view.

        Raises:
            OSError: It is no folder.
        """
        written = self.folder + key
        is_written = not self.is_free(key) and is_there(written)
        names = dict.fromkeys(REAL.listdir(written)) if is_written else {}
        if not is_written or (not self.is_gone(key) and is_there(key)):
            real = REAL.listdir(key if is_written else self.shown(key))
            names |= dict.fromkeys(name for name in real if f"{key.rstrip('/')}/{name}" not in self.gone)
        return list(names)

    def to_write(self, key: str, keep: bool) -> str:
        """Return the path at which a key is written, with all folders above it.

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
        written = self.folder + key
        if keep and not is_there(written) and not self.is_gone(key) and is_there(key):
            _copy(key, written)
        return written

    def drop(self, key: str) -> None:
        """Remove a file or an empty folder in the view."""
        self._links.clear()
        at = key if self.is_free(key) else self.folder + key
        if is_there(at):
            (REAL.rmdir if stat.S_ISDIR(REAL.lstat(at).st_mode) else REAL.unlink)(at)
        self._hide(key)

    def move(self, source: str, target: str) -> None:
        """Let a file or a folder have another key, in the place of what was there."""
        if self.exists(target):
            self.drop(target)
        self._copy_tree(source, target)
        self._remove_tree(source)

    def _copy_tree(self, source: str, target: str) -> None:
        """Let a key have what another one has: what the script has written is moved, the rest is copied."""
        shown, to = self.shown(source), self.to_write(target, keep=False)
        if not stat.S_ISDIR(REAL.lstat(shown).st_mode):
            try:
                if shown != self.folder + source and not self.is_free(source):
                    raise OSError(errno.EXDEV, "real files are copied")
                REAL.rename(shown, to)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _copy(shown, to)
            return
        REAL.mkdir(to)
        for name in self.names(source):
            self._copy_tree(f"{source}/{name}", f"{target}/{name}")

    def _remove_tree(self, key: str) -> None:
        if self.is_folder(key):
            for name in self.names(key):
                self._remove_tree(f"{key}/{name}")
        self.drop(key)

    def _hide(self, key: str) -> None:
        """Let what really is at a key be there no more."""
        if not self.is_free(key):
            self.gone = {one for one in self.gone if not one.startswith(key + "/")}
            if is_there(key):
                self.gone.add(key)
            self._changed = True

    def _make_folders(self, key: str) -> None:
        if not stat.S_ISDIR(REAL.stat(self.shown(key)).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
        missing: list[str] = []
        while key != "/" and not is_there(self.folder + key):
            missing.append(key)
            key = str(PurePosixPath(key).parent)
        for one in reversed(missing):
            REAL.mkdir(self.folder + one)

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


def is_there(path: str) -> bool:
    """Whether there is anything at a path, a link that leads nowhere too."""
    try:
        REAL.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _is_within(key: str, folder: str) -> bool:
    return key == folder or key.startswith(folder + "/")


def _copy(source: str, target: str) -> None:
    """Copy a file, or a link; of a folder only itself. Modes and times as far as the wall lets them be changed."""
    facts = REAL.lstat(source)
    if stat.S_ISDIR(facts.st_mode):
        REAL.mkdir(target)
    elif stat.S_ISLNK(facts.st_mode):
        REAL.symlink(REAL.readlink(source), target)
    elif stat.S_ISREG(facts.st_mode):
        mode = stat.S_IMODE(facts.st_mode) | stat.S_IRUSR | stat.S_IWUSR
        with (
            REAL.io_open(source, "rb") as read,
            open(REAL.open(target, os.O_WRONLY | os.O_CREAT, mode), "wb") as written,
        ):
            while block := read.read(1 << 22):
                written.write(block)
        try:
            REAL.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        except PermissionError:
            return
