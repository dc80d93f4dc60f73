"""Temporary folders of a rehearsal: they receive all writes and are removed at the end."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

_PREFIX: Final = "dryfit-rehearsal-"
_STOP: Final = "stop"
_LOCK: Final = "lock"
_LONGEST_TEMPORARY: Final = 60
"""Letters of a temporary folder: sockets of ``multiprocessing`` lie 32 letters below it, and may have 107."""
_CACHES: Final = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "~/.cache/huggingface",
    "HF_HUB_CACHE": "",
    "HF_XET_CACHE": "",
    "HF_ASSETS_CACHE": "",
    "HF_MODULES_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TRANSFORMERS_CACHE": "",
    "SENTENCE_TRANSFORMERS_HOME": "",
    "TORCH_HOME": "",
    "TORCH_EXTENSIONS_DIR": "",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TRITON_CACHE_DIR": "",
    "TRITON_HOME": "~/.triton",
    "NUMBA_CACHE_DIR": "",
    "KERAS_HOME": "~/.keras",
    "NLTK_DATA": "~/nltk_data",
    "MPLCONFIGDIR": "~/.config/matplotlib",
}
"""Variables that name caches of libraries, and where these are without."""


class Wall(StrEnum):
    """What keeps a rehearsal from the user's files, the strongest first."""

    NAMESPACES = "namespaces"
    """The kernel shows a copy-on-write view of all files: every way of writing lands in the rehearsal's folder."""
    LANDLOCK = "landlock"
    """Python's functions are redirected; the kernel refuses every other way of writing elsewhere."""
    REDIRECT = "redirect"
    """Python's functions are redirected; what code in C and other programs write is written."""


WALLS: Final = {
    Wall.NAMESPACES: "a copy-on-write view: whatever is written, real files stay as they are",
    Wall.LANDLOCK: "writes of Python are redirected, the kernel refuses all others",
    Wall.REDIRECT: "only writes of Python are redirected, code in C and other programs write real files",
}
"""What each wall does, in words."""


class Places:
    """Folders of one rehearsal.

    Args:
        folder: All of them are in it. A script that sees a copy-on-write view of all files finds only ``own`` there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        """What is written, each file below its own absolute path."""
        self.own = folder / "own"
        """What the process can write as it is: its answer and its temporary folder."""
        self.work = folder / "work"
        """What overlayfs needs."""
        self.temporary = self.own / "tmp"

    @contextmanager
    def made(self) -> Generator[None, None, None]:
        """Within, they are there."""
        with nullcontext() if self._is_short() else claimed_folder() as short:
            if short is not None:
                self.temporary = short
            self.make()
            try:
                yield
            finally:
                self.clear()

    def _is_short(self) -> bool:
        return len(str(self.temporary.absolute())) <= _LONGEST_TEMPORARY

    def own_behind(self, wall: Wall) -> Path:
        """Return where the process behind a wall finds what it can write as it is."""
        return (self.folder if wall is Wall.NAMESPACES else self.own).resolve()

    def enter(self, wall: Wall) -> Path:
        """Let this process, which is behind a wall, use its temporary folder; return what is its own."""
        own = self.own_behind(wall)
        temporary = own / self.temporary.name if self.temporary.parent == self.own else self.temporary.resolve()
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        return own

    def stop(self) -> None:
        """Ask the process behind the wall to say what it has seen, and to end."""
        (self.own / _STOP).touch()

    def is_stopped(self, wall: Wall) -> bool:
        """Whether that was asked for; of the process behind a wall."""
        return (self.own_behind(wall) / _STOP).exists()

    def make(self) -> None:
        """Make the folders."""
        for one in (self.files, self.own, self.work, self.temporary):
            one.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove them."""
        for one in (self.files, self.own, self.work):
            remove(one)


@contextmanager
def claimed_folder() -> Generator[Path, None, None]:
    """Provide a temporary folder of this process; folders of killed processes are removed."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, in whatever way
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def _remove_left() -> None:
    """Remove temporary folders whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or just being made
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder as far as this user can, whatever the modes of what is in it."""

    def again(function: Callable[..., object], path: str, _: object) -> None:
        with suppress(OSError):
            for one in (os.path.dirname(path), path):
                if not os.path.islink(one):
                    os.chmod(one, stat.S_IRWXU)
            if function is os.unlink:
                os.unlink(path)
            else:
                shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=again)


def caches(environment: Mapping[str, str], apart: Iterable[Path]) -> list[Path]:
    """Return the folders that libraries use as caches, but for those that contain anything else of the user's.

    Args:
        apart: The project: script, working folder, home.
    """
    named = (environment.get(name) or usual for name, usual in _CACHES.items())
    folders = {Path(text).expanduser().resolve() for text in named if text}
    projects = [path.resolve() for path in apart]
    return sorted(folder for folder in folders if not any(path.is_relative_to(folder) for path in projects))
