"""The functions of ``os``, and ``open``, that read and write in the view of :mod:`dryfit.virtual.writes.shadow`.

They are replaced for the life of the process, wherever a module has them by name already. ``shutil``, ``pathlib``,
``tempfile``, ``glob``, ``logging``, ``zipfile`` and numpy go through them.
"""

import builtins
import errno
import functools
import gc
import inspect
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from types import FunctionType
from typing import Any, Final

from dryfit.virtual.writes.shadow import REAL, Shadow, path_of
from dryfit.virtual.writes.shadow_entries import Entries, Entry

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LARGE_BYTES: Final = 64 << 20
"""From so many bytes on, what is really there is not copied before it is changed."""
_TMPFILE: Final = getattr(os, "O_TMPFILE", 0)
_KEPT_MODULES: Final = ("posix", "_io")
"""Modules that keep the functions as they are: Python's own imports use them."""


class Replaced:
    """What stands for a function of ``os``: as such a one it is not bound where it is an attribute of a class."""

    def __init__(self, real: Any, function: Callable[..., Any]) -> None:
        self.__name__ = self.__qualname__ = real.__name__
        self.__doc__ = real.__doc__
        self.__module__ = real.__module__
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it by its name: the script may send functions that use it to other processes."""
        return _by_name, ("io" if self.__name__ == "open" and self.__module__ == "_io" else "os", self.__name__)


def _by_name(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


class RedirectedFiles:
    """The functions, one method each where they differ."""

    def __init__(self, shadow: Shadow) -> None:
        self._view = shadow
        # Bound, so that it is not replaced with all others.
        self._copyfile = functools.partial(shutil.copyfile)

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """Return what stands for each function."""
        made: dict[Any, Callable[..., Any]] = {
            REAL.io_open: self.open,
            REAL.open: self.os_open,
            REAL.getcwd: self._view.cwd,
            REAL.getcwdb: lambda: os.fsencode(self._view.cwd()),
            REAL.listdir: self.listdir,
            REAL.scandir: self.scandir,
            REAL.mkdir: self.mkdir,
            REAL.rmdir: self.rmdir,
            REAL.remove: self.unlink,
            REAL.unlink: self.unlink,
            REAL.rename: self.rename,
            REAL.replace: self.rename,
            REAL.link: self.link,
            REAL.symlink: self.symlink,
            REAL.truncate: self.truncate,
            shutil.copyfile: self.copyfile,
        }
        for name in ("stat", "access", "statvfs", "chdir", "getxattr", "listxattr"):
            if hasattr(REAL, name):
                made[getattr(REAL, name)] = self._reading(getattr(REAL, name), follow=True)
        for name in ("lstat", "readlink"):
            made[getattr(REAL, name)] = self._reading(getattr(REAL, name), follow=False)
        for name in ("utime", "chmod", "lchmod", "chown", "lchown", "chflags", "setxattr", "removexattr"):
            if hasattr(REAL, name):
                made[getattr(REAL, name)] = self._marking(getattr(REAL, name), follow=not name.startswith("l"))
        for name in ("mkfifo", "mknod"):
            made[getattr(REAL, name)] = self._making(getattr(REAL, name))
        return {real: Replaced(real, function) for real, function in made.items()}

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, as ``open`` does."""
        if isinstance(file, int) or self._view.is_busy:
            return REAL.io_open(file, mode, *args, **kwargs)
        if kwargs.get("opener") is not None or len(args) > 5:  # the opener is the last argument
            with self._view.as_opened():
                return REAL.io_open(file, mode, *args, **kwargs)
        if not set(mode) & set("wxa+"):
            if not self._view.is_used:
                return REAL.io_open(file, mode, *args, **kwargs)
            path = self._found(file)
        else:
            path = self._written(file, keep="w" not in mode, new="x" in mode)
        with self._as_called(file):
            return REAL.io_open(path, mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a descriptor."""
        if self._view.is_busy:
            return REAL.open(path, flags, mode, dir_fd=dir_fd)
        follow = not flags & getattr(os, "O_NOFOLLOW", 0)
        if _TMPFILE and flags & _TMPFILE == _TMPFILE:
            key = self._view.resolve(path, dir_fd)
            at = self._written(f"{key}/unnamed", keep=False, new=False)
            at = str(PurePosixPath(at).parent)
        elif not flags & _WRITES:
            if not self._view.is_used:
                return REAL.open(path, flags, mode, dir_fd=dir_fd)
            at = self._found(path, dir_fd, follow)
        else:
            new = flags & os.O_CREAT and flags & os.O_EXCL
            if not flags & os.O_CREAT and not self._view.exists(self._view.resolve(path, dir_fd, follow)):
                raise _error(errno.ENOENT, path)
            key = self._view.resolve(path, dir_fd, follow=follow and not new)
            at = self._written(path, keep=not flags & os.O_TRUNC, new=bool(new), key=key)
        with self._as_called(path):
            return REAL.open(at, flags, mode)

    def listdir(self, path: Any = None) -> list[Any]:
        """Return the names in a folder."""
        if self._view.is_busy or not self._view.is_used:
            return REAL.listdir(path)
        with self._as_called(path):
            names = self._view.names(self._folder(path))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = None) -> Any:
        """Return the entries of a folder."""
        if self._view.is_busy or not self._view.is_used:
            return REAL.scandir(path)
        with self._as_called(path):
            key = self._folder(path)
            names = self._view.names(key)
        base = "" if isinstance(path, int) else "." if path is None else os.fspath(path)
        return Entries(Entry(self._view, key, name, base) for name in names)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """Make a folder."""
        if self._view.is_busy:
            return REAL.mkdir(path, mode, dir_fd=dir_fd)
        return self._making(REAL.mkdir)(path, mode, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Remove an empty folder."""
        if self._view.is_busy:
            return REAL.rmdir(path, dir_fd=dir_fd)
        with self._as_called(path):
            key = self._view.resolve(path, dir_fd, follow=False)
            if not self._view.exists(key):
                raise _error(errno.ENOENT, path)
            if not self._view.is_folder(key):
                raise _error(errno.ENOTDIR, path)
            if self._view.names(key):
                raise _error(errno.ENOTEMPTY, path)
            return self._view.drop(key)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Remove a file or a link."""
        if self._view.is_busy:
            return REAL.unlink(path, dir_fd=dir_fd)
        with self._as_called(path):
            key = self._view.resolve(path, dir_fd, follow=False)
            if not self._view.exists(key):
                raise _error(errno.ENOENT, path)
            if self._view.is_folder(key):
                raise _error(errno.EISDIR, path)
            return self._view.drop(key)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Move a file or a folder in the place of another one."""
        if self._view.is_busy:
            return REAL.replace(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        view = self._view
        source, target = view.resolve(src, src_dir_fd, follow=False), view.resolve(dst, dst_dir_fd, follow=False)
        if not view.exists(source) or not view.is_folder(str(PurePosixPath(target).parent)):
            raise _error(errno.ENOENT, src, dst)
        if target.startswith(source + "/"):
            raise _error(errno.EINVAL, src, dst)
        if view.exists(target):
            if view.is_folder(source) and not view.is_folder(target):
                raise _error(errno.ENOTDIR, src, dst)
            if view.is_folder(target) and not view.is_folder(source):
                raise _error(errno.EISDIR, src, dst)
            if source == target:
                return None
            if view.is_folder(target) and view.names(target):
                raise _error(errno.ENOTEMPTY, src, dst)
        with view.as_asked():
            return view.move(source, target)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """Give a file a second name; what was not written by the script is not linked, but borrowed."""
        view = self._view
        if view.is_busy:
            return REAL.link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        source = view.resolve(src, src_dir_fd, follow_symlinks)
        target = view.resolve(dst, dst_dir_fd, follow=False)
        if not view.exists(source) and not source.startswith("/proc/"):
            raise _error(errno.ENOENT, src, dst)
        if view.exists(target):
            raise _error(errno.EEXIST, src, dst)
        with self._as_called(dst):
            shown = view.shown(source)
            if shown.startswith("/proc/"):  # an unnamed file of this process, which gets a name
                # Only with a folder's descriptor, which an absolute path ignores, does Python follow the link.
                return REAL.link(shown, view.to_write(target, keep=False), src_dir_fd=0, follow_symlinks=True)
            if shown.startswith(view.folder + "/") or (view.is_free(source) and view.is_free(target)):
                return REAL.link(shown, view.to_write(target, keep=False))
            return view.borrow(source, target)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        """Make a link."""
        if self._view.is_busy:
            return REAL.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        with self._as_called(dst):
            key = self._view.resolve(dst, dir_fd, follow=False)
            if self._view.exists(key):
                raise _error(errno.EEXIST, src, dst)
            return REAL.symlink(os.fsdecode(src), self._view.to_write(key, keep=False))

    def truncate(self, path: Any, length: int) -> None:
        """Cut a file."""
        if isinstance(path, int) or self._view.is_busy:
            return REAL.truncate(path, length)
        if not self._view.exists(self._view.resolve(path)):
            raise _error(errno.ENOENT, path)
        at = self._written(path, keep=True, new=False)
        with self._as_called(path):
            return REAL.truncate(at, length)

    def copyfile(self, src: Any, dst: Any, *, follow_symlinks: bool = True) -> Any:
        """Copy a file; a large one that the script did not write is borrowed."""
        view = self._view
        if view.is_busy or not follow_symlinks or not _is_path(src) or not _is_path(dst):
            return self._copyfile(src, dst, follow_symlinks=follow_symlinks)
        source, target = view.resolve(src), view.resolve(dst)
        shown = view.shown(source)
        in_shadow = shown.startswith(view.folder + "/")
        with view.as_asked():
            large = os.path.isfile(shown) and os.path.getsize(shown) > _LARGE_BYTES  # noqa: PTH113, PTH202
            parent = view.is_folder(str(PurePosixPath(target).parent))
        if not in_shadow and large and parent and not view.is_free(target) and not view.is_folder(target):
            if source == target:
                raise shutil.SameFileError(f"{src!r} and {dst!r} are the same file")
            view.borrow(source, target)
        else:
            self._copyfile(src, dst)
        if source in view.notes:
            view.notes[target] = view.notes[source]
        return dst

    def _reading(self, real: Callable[..., Any], follow: bool) -> Callable[..., Any]:
        """Return a function that is told where its path is found."""

        def function(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) or self._view.is_busy or not self._view.is_used:
                return real(path, *args, **kwargs)
            found = self._found(path, kwargs.pop("dir_fd", None), kwargs.get("follow_symlinks", follow))
            with self._as_called(path):
                answer = real(found, *args, **kwargs)
            return os.fsencode(answer) if isinstance(path, bytes) and isinstance(answer, str) else answer

        return function

    def _marking(self, real: Callable[..., Any], follow: bool) -> Callable[..., Any]:
        """Return a function that changes what is known of a file: only of those that the script wrote."""

        def function(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) or self._view.is_busy:
                return real(path, *args, **kwargs)
            view = self._view
            key = view.resolve(path, kwargs.pop("dir_fd", None), kwargs.get("follow_symlinks", follow))
            shown = view.shown(key)
            if not view.exists(key):
                raise _error(errno.ENOENT, path)
            if not view.is_free(key) and not shown.startswith(view.folder + "/"):
                return None
            with self._as_called(path):
                return real(shown, *args, **kwargs)

        return function

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes what must not be there."""

        def function(path: Any, *args: Any, dir_fd: int | None = None) -> Any:
            if self._view.is_busy:
                return real(path, *args, dir_fd=dir_fd)
            key = self._view.resolve(path, dir_fd, follow=False)
            at = self._written(path, keep=False, new=True, key=key)
            with self._as_called(path):
                return real(at, *args)

        return function

    def _found(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        return self._view.shown(self._view.resolve(path, dir_fd, follow))

    def _folder(self, path: Any) -> str:
        return self._view.resolve(path_of(path) if isinstance(path, int) else "." if path is None else path)

    def _written(self, path: Any, keep: bool, new: bool, key: str | None = None) -> str:
        """Return where a path is written.

        Raises:
            FileExistsError: It is there, though it is made anew.
            IsADirectoryError: It is a folder.
        """
        with self._as_called(path):
            key = self._view.resolve(path, follow=not new) if key is None else key
            if new and self._view.exists(key):
                raise _error(errno.EEXIST, path)
            if self._view.is_folder(key):
                raise _error(errno.EISDIR, path)
            if not keep:
                self._view.notes.pop(key, None)
            return self._view.to_write(key, keep)

    @contextmanager
    def _as_called(self, path: Any) -> Iterator[None]:
        """Within, paths are the right ones; an error names the path that the script gave."""
        try:
            with self._view.as_asked():
                yield
        except OSError as error:
            if error.filename is not None and error.filename2 is None:
                error.filename = path if isinstance(path, int) or path is None else os.fspath(path)
            raise


def install(shadow: Shadow, more: dict[Any, Any]) -> None:
    """Replace the functions, and more, wherever a module or a function's defaults have them by name."""
    made = RedirectedFiles(shadow).functions()
    replace_everywhere({**made, **more})
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        known |= {made[function] for function in known & made.keys()}
    builtins.open = io.open = made[REAL.io_open]


def replace_everywhere(replaced: dict[Any, Any]) -> None:
    """Replace functions wherever they were taken before: in names of modules, tables, and defaults of functions."""
    if not replaced:
        return
    by_id = {id(old): new for old, new in replaced.items()}
    has_none = by_id.keys().isdisjoint  # most objects: this asks no Python code of each
    kept = {id(vars(sys.modules[name])) for name in _KEPT_MODULES if name in sys.modules}
    kept |= {id(vars(REAL)), id(replaced)}
    for one in gc.get_objects():
        if type(one) is dict:
            if has_none(map(id, one.values())) or id(one) in kept:
                continue
            for key in [key for key, value in one.items() if id(value) in by_id]:
                one[key] = by_id[id(one[key])]
        elif type(one) is FunctionType and one.__defaults__ and not has_none(map(id, one.__defaults__)):
            one.__defaults__ = tuple(by_id.get(id(value), value) for value in one.__defaults__)


def named_as(real: Callable[..., Any]) -> Callable[[Any], Any]:
    """Give a function the name of another one, but no way back to it, which would be replaced by itself."""

    def decorate(function: Any) -> Any:
        functools.update_wrapper(function, real)
        del function.__wrapped__
        with suppress(ValueError):  # some functions of C have none
            function.__signature__ = inspect.signature(real)
        return function

    return decorate


def _is_path(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike)


def _error(number: int, path: Any, other: Any = None) -> OSError:
    if other is None:
        return OSError(number, os.strerror(number), os.fspath(path))
    return OSError(number, os.strerror(number), os.fspath(path), None, os.fspath(other))
