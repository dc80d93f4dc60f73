"""Functions of ``os``, and ``open``, redirected into the folders of a rehearsal."""

import builtins
import errno
import functools
import gc
import inspect
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath, PurePosixPath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.view import REAL, View, path_of

# Functions are replaced wherever a module, a table or a function's defaults have them by name already.


_KEPT_MODULES: Final = ("posix", "_io")
"""Modules that keep the functions as they are: Python's own imports use them."""
_KEPT_TABLE: Final = "dryfit.gpu.view"


def replace_everywhere(replaced: dict[Any, Any]) -> None:
    """Replace functions wherever they were taken before: in names of modules, tables, and defaults of functions."""
    if not replaced:
        return
    by_id = {id(old): new for old, new in replaced.items()}
    has_none = by_id.keys().isdisjoint  # most objects: this asks no Python code of each
    kept = {id(vars(sys.modules[name])) for name in _KEPT_MODULES if name in sys.modules}
    if _KEPT_TABLE in sys.modules:
        kept.add(id(vars(sys.modules[_KEPT_TABLE].REAL)))
    kept.add(id(replaced))
    for one in gc.get_objects():
        if type(one) is dict:
            if has_none(map(id, one.values())) or id(one) in kept:
                continue
            of_class = "__module__" in one and "__name__" not in one
            for key in [key for key, value in one.items() if id(value) in by_id]:
                old, new = one[key], by_id[id(one[key])]
                # A function of C that a class has, as pathlib's has in Python 3.10, takes no instance.
                one[key] = staticmethod(new) if of_class and isinstance(old, BuiltinFunctionType) else new
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


# Renames that overlayfs cannot do: of a folder that was there before, and between two overlays.
#
# The kernel answers as it does between file systems (``EXDEV``). ``mv`` and ``shutil.move`` copy then, and so does
# what stands for ``os.rename`` here, as for most users both places are on one file system.


def copying() -> dict[Any, Any]:
    """Return what takes the place of both functions."""
    return {real: _copying(real) for real in (os.rename, os.replace)}


def _copying(real: Callable[..., None]) -> Callable[..., None]:
    @named_as(real)
    def rename(src: Any, dst: Any, **folders: Any) -> None:
        try:
            real(src, dst, **folders)
        except OSError as error:
            if error.errno != errno.EXDEV or any(folder is not None for folder in folders.values()):
                raise
            source, target = os.fsdecode(src), os.fsdecode(dst)
            if os.path.isdir(source) and not os.path.islink(source):
                if os.path.lexists(target):
                    os.rmdir(target)  # as a rename does: only where it is empty
                shutil.copytree(source, target, symlinks=True)
                shutil.rmtree(source)
            else:
                beside = str(PurePath(target).with_name(f".{os.getpid()}.renamed"))
                shutil.copy2(source, beside, follow_symlinks=False)
                real(beside, target)
                os.unlink(source)

    return rename


# The functions of ``os``, and ``open``, that read and write in a :class:`~dryfit.gpu.view.View`.
#
# Where the kernel cannot show a script a view of all files, Python does, for Python's own functions: they are
# replaced for the life of the process, wherever a module has them by name already. ``shutil``, ``pathlib``,
# ``tempfile``, ``glob``, ``logging``, ``zipfile`` and numpy go through them. What goes another way is refused: by an
# audit hook what Python tells of, by Landlock, where the kernel has it, all the rest.


_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGED: Final = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
}
"""Which arguments of an audit event are paths that are changed."""
_OPENED_BY_C: Final = {
    "pyarrow": {"memory_map": 0, "OSFile": 0},
    "tokenizers": {"Tokenizer.from_file": 0, "Tokenizer.save": 1},
    "sentencepiece": {"SentencePieceProcessor.LoadFromFile": 1},
}
"""Functions of C code that read, or write, what scripts write by Python, and which argument is the path."""


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


class Redirected:
    """The functions, one method each where they differ."""

    def __init__(self, view: View) -> None:
        self._view = view

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """Return what stands for each function."""
        made: dict[Any, Callable[..., Any]] = {
            REAL.io_open: self.open,
            REAL.open: self.os_open,
            REAL.getcwd: self._view.cwd,
            REAL.getcwdb: lambda: os.fsencode(self._view.cwd()),
            REAL.listdir: self.listdir,
            REAL.scandir: self.scandir,
            REAL.mkdir: self._making(REAL.mkdir),
            REAL.rmdir: functools.partial(self.remove, True, REAL.rmdir),
            REAL.remove: functools.partial(self.remove, False, REAL.remove),
            REAL.unlink: functools.partial(self.remove, False, REAL.unlink),
            REAL.rename: self.rename,
            REAL.replace: self.rename,
            REAL.link: self.link,
            REAL.symlink: self.symlink,
            REAL.truncate: self.truncate,
        }
        for name in ("stat", "access", "statvfs", "chdir", "getxattr", "listxattr"):
            if hasattr(REAL, name):
                made[getattr(REAL, name)] = self._reading(getattr(REAL, name), follow=True)
        for name in ("lstat", "readlink"):
            made[getattr(REAL, name)] = self._reading(getattr(REAL, name), follow=False)
        for name in ("utime", "chmod", "lchmod", "chown", "lchown", "chflags", "setxattr", "removexattr"):
            if hasattr(REAL, name):
                made[getattr(REAL, name)] = self._marking(getattr(REAL, name), follow=not name.startswith("l"))
        return {real: Replaced(real, function) for real, function in made.items()}

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, as ``open`` does."""
        file = file if isinstance(file, int) else os.fspath(file)
        if isinstance(file, int) or self._view.is_busy:
            return REAL.io_open(file, mode, *args, **kwargs)
        if kwargs.get("opener") is not None or len(args) > 5:  # the opener is the last argument, and calls os.open
            with self._view.as_opened():
                return REAL.io_open(file, mode, *args, **kwargs)
        if not set(mode) & set("wxa+"):
            if not self._view.is_used:
                return REAL.io_open(file, mode, *args, **kwargs)
            path = self._found(file)
        else:
            path = self._written(file, keep="w" not in mode, new="x" in mode)
        with self._as_called(file):
            opened = REAL.io_open(path, mode, *args, **kwargs)
        raw = getattr(opened, "buffer", opened)
        getattr(raw, "raw", raw).name = file  # the script knows it by this name
        return opened

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a descriptor."""
        path = os.fspath(path)
        if self._view.is_busy:
            return REAL.open(path, flags, mode, dir_fd=dir_fd)
        follow = not flags & getattr(os, "O_NOFOLLOW", 0)
        if not flags & _WRITES:
            if not self._view.is_used:
                return REAL.open(path, flags, mode, dir_fd=dir_fd)
            at = self._found(path, dir_fd, follow)
        else:
            new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
            key = self._view.resolve(path, dir_fd, follow=follow and not new)
            if not flags & os.O_CREAT and not self._view.exists(key):
                raise _error(errno.ENOENT, path)
            at = self._written(path, keep=not (flags & os.O_TRUNC and flags & os.O_CREAT), new=new, key=key)
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
        return _Entries(_Entry(self._view, key, name, base) for name in names)

    def remove(self, of_folder: bool, real: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> None:
        """Remove a file, a link or an empty folder."""
        path = os.fspath(path)
        if self._view.is_busy:
            return real(path, dir_fd=dir_fd)
        with self._as_called(path):
            key = self._view.resolve(path, dir_fd, follow=False)
            if not self._view.exists(key):
                raise _error(errno.ENOENT, path)
            if self._view.is_folder(key) is not of_folder:
                raise _error(errno.ENOTDIR if of_folder else errno.EISDIR, path)
            if of_folder and self._view.names(key):
                raise _error(errno.ENOTEMPTY, path)
            return self._view.drop(key)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Move a file or a folder in the place of another one."""
        src, dst = os.fspath(src), os.fspath(dst)
        if self._view.is_busy:
            return REAL.replace(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        view = self._view
        source, target = view.resolve(src, src_dir_fd, follow=False), view.resolve(dst, dst_dir_fd, follow=False)
        if not view.exists(source) or not view.is_folder(str(PurePosixPath(target).parent)):
            raise _error(errno.ENOENT, src, dst)
        if target.startswith(source + "/"):
            raise _error(errno.EINVAL, src, dst)
        if view.exists(target):
            if view.is_folder(source) is not view.is_folder(target):
                raise _error(errno.ENOTDIR if view.is_folder(source) else errno.EISDIR, src, dst)
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
        """Give a file a second name; what the script did not write is copied."""
        view, src, dst = self._view, os.fspath(src), os.fspath(dst)
        if view.is_busy:
            return REAL.link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        source = view.resolve(src, src_dir_fd, follow_symlinks)
        target = view.resolve(dst, dst_dir_fd, follow=False)
        if not view.exists(source):
            raise _error(errno.ENOENT, src, dst)
        if view.exists(target):
            raise _error(errno.EEXIST, src, dst)
        with self._as_called(dst):
            return REAL.link(view.to_write(source, keep=True), view.to_write(target, keep=False))

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        """Make a link."""
        src, dst = os.fspath(src), os.fspath(dst)
        if self._view.is_busy:
            return REAL.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        with self._as_called(dst):
            key = self._view.resolve(dst, dir_fd, follow=False)
            if self._view.exists(key):
                raise _error(errno.EEXIST, src, dst)
            return REAL.symlink(os.fsdecode(src), self._view.to_write(key, keep=False))

    def truncate(self, path: Any, length: int) -> None:
        """Cut a file."""
        path = path if isinstance(path, int) else os.fspath(path)
        if isinstance(path, int) or self._view.is_busy:
            return REAL.truncate(path, length)
        if not self._view.exists(self._view.resolve(path)):
            raise _error(errno.ENOENT, path)
        at = self._written(path, keep=True, new=False)
        with self._as_called(path):
            return REAL.truncate(at, length)

    def _reading(self, real: Callable[..., Any], follow: bool) -> Callable[..., Any]:
        """Return a function that is told where its path is found."""

        def function(path: Any, *args: Any, **kwargs: Any) -> Any:
            path = path if isinstance(path, int) else os.fspath(path)
            if isinstance(path, int) or self._view.is_busy or not self._view.is_used:
                return real(path, *args, **kwargs)
            found = self._found(path, kwargs.pop("dir_fd", None), kwargs.get("follow_symlinks", follow))
            with self._as_called(path):
                answer = real(found, *args, **kwargs)
            return os.fsencode(answer) if isinstance(path, bytes) and isinstance(answer, str) else answer

        return function

    def _marking(self, real: Callable[..., Any], follow: bool) -> Callable[..., Any]:
        """Return a function that changes modes, times and the like of what the script wrote, where the wall lets it."""

        def function(path: Any, *args: Any, **kwargs: Any) -> Any:
            view = self._view
            path = path if isinstance(path, int) else os.fspath(path)
            if not isinstance(path, int) and view.is_busy:
                return real(path, *args, **kwargs)
            text, followed = (path_of(path), False) if isinstance(path, int) else (path, True)
            follows = followed and kwargs.get("follow_symlinks", follow)
            key = view.resolve(text, kwargs.pop("dir_fd", None), follows)
            shown = view.shown(key)
            if not view.exists(key):
                raise _error(errno.ENOENT, path)
            if not view.is_free(key) and not shown.startswith(view.folder + "/"):
                return None
            with self._as_called(path):
                try:
                    return real(path if isinstance(path, int) else shown, *args, **kwargs)
                except PermissionError:
                    return None  # the wall knows no paths here, and refuses it of any file

        return function

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes what must not be there."""

        def function(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            path = os.fspath(path)
            if self._view.is_busy:
                return real(path, *args, dir_fd=dir_fd, **kwargs)
            key = self._view.resolve(path, dir_fd, follow=False)
            at = self._written(path, keep=False, new=True, key=key)
            with self._as_called(path):
                return real(at, *args, **kwargs)

        return function

    def _found(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        return self._view.shown(self._view.resolve(path, dir_fd, follow))

    def _folder(self, path: Any) -> str:
        return self._view.resolve(path_of(path) if isinstance(path, int) else "." if path is None else os.fspath(path))

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
            return self._view.to_write(key, keep)

    @contextmanager
    def _as_called(self, path: Any) -> Iterator[None]:
        """Within, paths are the right ones; an error names the path that the script gave."""
        try:
            with self._view.as_asked():
                yield
        except OSError as error:
            if error.filename is not None and error.filename2 is None:
                error.filename = path
            raise


class _Entry:
    """An entry of a folder in the view: as :class:`os.DirEntry`."""

    def __init__(self, view: View, folder: str, name: str, base: Any) -> None:
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


class _Entries:
    """Entries of a folder: as what :func:`os.scandir` returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


def install(view: View, refused: Callable[[str], None]) -> None:
    """Replace the functions, and refuse every other way of writing that Python tells of.

    Args:
        refused: Called with each path where that was tried.
    """
    made = Redirected(view).functions()
    replace_everywhere(dict(made))
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        known |= {made[function] for function in known & made.keys()}
    builtins.open = io.open = made[REAL.io_open]
    for name, functions in _OPENED_BY_C.items():
        when_imported(name, functools.partial(_point, view, functions))
    sys.addaudithook(functools.partial(_audit, view, refused))


def _audit(view: View, refused: Callable[[str], None], event: str, args: tuple[Any, ...]) -> None:
    """Judge an event of Python's own functions.

    Raises:
        PermissionError: Something is changed that is neither in the view's folder nor free.
    """
    changed = _CHANGED.get(event, ())
    if event == "open" and (not isinstance(args[2], int) or args[2] & _WRITES):
        changed = (0,)
    if not changed or view.is_trusted:
        return
    for path in (args[at] for at in changed if not isinstance(args[at], int)):
        with view.as_asked():
            real = os.path.realpath(os.fsdecode(path))
        if not view.is_free(real) and not real.startswith(view.folder + "/"):
            refused(real)
            raise PermissionError(
                errno.EACCES, "a rehearsal writes nothing elsewhere, and this way of writing is not redirected", path
            )


def _point(view: View, functions: dict[str, int], module: ModuleType) -> None:
    """Let functions of C code find what was written by Python."""
    replaced: dict[Any, Any] = {}
    for name, at in functions.items():
        owner, _, method = name.rpartition(".")
        holder = getattr(module, owner) if owner else module
        function = getattr(holder, method)
        made = _pointed(view, function, at)
        if owner or isinstance(function, type):
            setattr(holder, method, staticmethod(made) if owner and at == 0 else made)
        else:
            replaced[function] = made
    replace_everywhere(replaced)


def _pointed(view: View, function: Callable[..., Any], at: int) -> Callable[..., Any]:
    @named_as(function)
    def pointed(*args: Any, **kwargs: Any) -> Any:
        if view.is_busy or len(args) <= at or not isinstance(args[at], str | os.PathLike):
            return function(*args, **kwargs)
        key = view.resolve(os.fspath(args[at]))
        writes = function.__name__ == "save" or "w" in str(kwargs.get("mode", args[1:2]))
        with view.as_asked():
            path = view.to_write(key, keep=False) if writes else view.shown(key)
        return function(*args[:at], path, *args[at + 1 :], **kwargs)

    return pointed


def _error(number: int, path: Any, other: Any = None) -> OSError:
    return OSError(number, os.strerror(number), path, *(() if other is None else (None, other)))
