"""A rehearsal creates nothing elsewhere: installs all that sees to it, and tells what would have been there."""

import os
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from dryfit.core.jobs.rehearsal import Muted
from dryfit.virtual.writes import guard, library_files, muted_hub, muted_trackers, redirected_files, unwritten_tensors
from dryfit.virtual.writes.shadow import REAL, Shadow
from dryfit.virtual.writes.unwritten_safetensors import SafetensorsFiles

_SYSTEM: Final = ("/dev", "/proc", "/sys")
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
"""Variables that name caches of libraries, and where these are without. What is downloaded stays there."""
_LONGEST_TEMPORARY: Final = 60
"""Letters of a temporary folder: sockets of ``multiprocessing`` lie 32 letters below it, and may have 107."""
_MOST_FOLDERS: Final = 50
"""Folders of written files that are told one by one."""
_installed: Final[list["Muting"]] = []


class Muting:
    """What the script would have done outside of its process."""

    def __init__(self, shadow: Shadow, temporary: Path) -> None:
        self.shadow = shadow
        self._temporary = temporary
        self._said: dict[tuple[str, str], int | None] = {}
        self._programs: Counter[str] = Counter()

    def clear(self) -> None:
        """Remove the script's temporary folder, at its end."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def muted(self) -> list[Muted]:
        """What was muted or redirected up to now: services first, then checkpoints, other files and programs."""
        said = [Muted(what=what, where=where, bytes=size) for (what, where), size in self._said.items()]
        programs = [
            Muted(what="program started, not muted", where=f"{name} ({times}x)" if times > 1 else name)
            for name, times in self._programs.items()
        ]
        with self.shadow.as_asked():
            return [*said, *self._files(), *programs]

    def say(self, what: str, where: str, size: int | None = None) -> None:
        """List something; the sizes of what is said again are added."""
        before = self._said.get((what, where))
        self._said[what, where] = size if before is None else before + (size or 0)

    def started(self, program: str) -> None:
        """Count a program that the script started."""
        self._programs[program] += 1

    def size_of(self, path: Any) -> int:
        """Return the bytes that a file, or all files of a folder, would have had."""
        key = self.shadow.resolve(path)
        if not self.shadow.is_folder(key):
            return REAL.stat(self.shadow.shown(key)).st_size + (self.shadow.unwritten(key) or 0)
        return sum(self.size_of(f"{key}/{name}") for name in self.shadow.names(key))

    def _files(self) -> Iterator[Muted]:
        """Yield the folders of checkpoints, whether they were removed again or not, then those of other files."""
        sizes = dict(self._sizes())
        checkpoints = {_parent(key) for key, (_, of_tensors) in sizes.items() if of_tensors}
        checkpoints |= {_parent(key) for key in self.shadow.removed}
        by_folder: Counter[str] = Counter()
        for key, (size, _) in sizes.items():
            by_folder[next((at for at in _parents(key) if at in checkpoints), _parent(key))] += size
        for key, size in self.shadow.removed.items():
            by_folder[_parent(key)] += size if key not in sizes else 0
        yield from (Muted(what="checkpoint", where=at, bytes=by_folder[at]) for at in sorted(checkpoints))
        others = {at: size for at, size in sorted(by_folder.items()) if at not in checkpoints}
        for at, size in _at_most(others, _MOST_FOLDERS).items():
            yield Muted(what="files", where=at, bytes=size)

    def _sizes(self) -> Iterator[tuple[str, tuple[int, bool]]]:
        """Yield each file of the shadow, with the size it would have, and whether it is of tensors."""
        for folder, _, names in os.walk(self.shadow.folder):
            for name in names:
                path = f"{folder}/{name}"
                key = self.shadow.unshadowed(path)
                if key in self.shadow.aliases:
                    continue
                facts = REAL.lstat(path)
                unwritten = self.shadow.unwritten(key) if stat.S_ISREG(facts.st_mode) else None
                yield key, (facts.st_size + (unwritten or 0), unwritten is not None)


def install(scratch: Path, make: Callable[[Any, torch.dtype], torch.Tensor]) -> Muting:
    """Let nothing be created elsewhere, for the life of this process; called before the script is run.

    Args:
        scratch: A folder of the rehearsal's own: ``files`` below it takes what the script writes, each file below its
            own absolute path; ``tmp`` is its temporary folder.
        make: Makes a tensor without values on the CPU, from shape and type: what is read of a file that was not
            written.

    Returns:
        What tells of what was muted.
    """
    temporary = _temporary(scratch)
    caches = [os.environ.get(name, usual) for name, usual in _CACHES.items()]
    roots = [*_SYSTEM, *(cache for cache in caches if cache)]
    free = [scratch, temporary, *(Path(root).expanduser() for root in roots)]
    shadow = Shadow(scratch / "files", free)
    muting = Muting(shadow, temporary)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    tensors = {**unwritten_tensors.install(shadow, make), **SafetensorsFiles(shadow, make).functions()}
    redirected_files.install(shadow, tensors)
    library_files.install(shadow)
    muted_trackers.install(scratch, muting.say)
    muted_hub.install(muting.say, muting.size_of)
    guard.install(shadow, muting.started)
    _installed.append(muting)
    return muting


@contextmanager
def unmuted() -> Iterator[None]:
    """Within, this thread reads and writes the real files, whether anything is muted or not."""
    if not _installed:
        yield
        return
    with _installed[-1].shadow.as_asked():
        yield


def _temporary(scratch: Path) -> Path:
    """Make a temporary folder and let everybody use it."""
    temporary = scratch.resolve() / "tmp"
    if len(str(temporary)) > _LONGEST_TEMPORARY:
        temporary = Path(tempfile.mkdtemp(prefix="dryfit-"))
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    return temporary


def _at_most(folders: dict[str, int], most: int) -> dict[str, int]:
    """Add the deepest folders to those above them until there are no more than so many."""
    while len(folders) > most:
        depth = max(at.count("/") for at in folders)
        fewer: Counter[str] = Counter()
        for at, size in folders.items():
            fewer[_parent(at) if at.count("/") == depth else at] += size
        folders = dict(fewer)
    return folders


def _parents(key: str) -> list[str]:
    return [key[:at] for at in range(len(key) - 1, 0, -1) if key[at] == "/"]


def _parent(key: str) -> str:
    return key.rpartition("/")[0] or "/"
