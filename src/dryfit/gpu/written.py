"""What a rehearsal has written: the bytes that files of tensors would have had, and the list that the answer tells.

A file of tensors without values is small: what it lacks is known by its content, which renames, copies and links keep.
The process behind the wall notes what it saves (:class:`Saved`); the process outside reads that, and the files.
"""

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from dryfit.settings.errors import FileError
from dryfit.settings.files import read_bounded, write_bytes_atomic
from dryfit.settings.rehearsal_messages import Muted

SAVES_FILE: Final = "saves.json"
"""In the folder of the process's own: what it has saved."""
_MOST_FOLDERS: Final = 50
"""Folders of written files that are told one by one."""
_BLOCK_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 26


class Save(NamedTuple):
    """A file of tensors as it was saved.

    Attributes:
        path: Where; empty: into memory.
        lacks: Bytes that a real one would have besides.
        size: Its own bytes.
        digest: SHA-256 of them; empty: it is a part of the file.
    """

    path: str
    lacks: int
    size: int
    digest: str


def _save(path: str, lacks: int, size: int, digest: str) -> Save:
    """Return what was noted, if it can have been.

    Raises:
        TypeError: It cannot.
    """
    save = Save(path, lacks, size, digest)
    if [type(one) for one in save] != [str, int, int, str]:
        raise TypeError(f"{save} is no file that was saved")
    return save


class Saved:
    """All files of tensors that a process has saved."""

    def __init__(self) -> None:
        self.saves: list[Save] = []

    def note_file(self, path: str, lacks: int) -> None:
        """Note a file that is whole."""
        size, digest = _content(path)
        self.saves.append(Save(os.path.realpath(path), lacks, size, digest))

    def note_bytes(self, content: bytes, lacks: int) -> None:
        """Note what may become a file."""
        self.saves.append(Save("", lacks, len(content), hashlib.sha256(content).hexdigest()))

    def note_part(self, path: str, lacks: int) -> None:
        """Note what was written to an open file, which may have other parts."""
        self.saves.append(Save(os.path.realpath(path), lacks, 0, ""))

    def lacks(self, path: str, key: str = "") -> int | None:
        """Return the bytes that a file lacks; None: it is none of these.

        Args:
            key: Its path as the script knows it; empty: the same.
        """
        size = os.stat(path).st_size
        if any(save.size == size and save.digest for save in self.saves):
            content = _content(path)
            for save in self.saves:
                if (save.size, save.digest) == content:
                    return save.lacks
        key = key or os.path.realpath(path)
        parts = [save.lacks for save in self.saves if save.path == key and not save.digest]
        return sum(parts) if parts else None

    def size_of(self, path: str) -> int:
        """Return the bytes that a file, or all files of a folder, would have had."""
        if os.path.isdir(path):
            return sum(self.size_of(os.path.join(path, name)) for name in os.listdir(path))
        return os.stat(path).st_size + (self.lacks(path) or 0)

    def write(self, file: Path) -> None:
        """Write it for the process outside."""
        write_bytes_atomic(file, json.dumps(self.saves).encode(), durable=False)

    @classmethod
    def read(cls, file: Path) -> "Saved":
        """Read what was written; nothing where nothing was, or where the script has put something else there."""
        saved = cls()
        with suppress(FileNotFoundError, FileError, TypeError, ValueError, RecursionError):
            saved.saves = [_save(*one) for one in json.loads(read_bounded(file, _MOST_BYTES))]
        return saved


def written(folder: Path, saved: Saved, apart: tuple[str, ...]) -> list[Muted]:
    """Return the folders of checkpoints, whether they were removed again or not, then those of other files.

    Args:
        folder: Has each written file below its own absolute path.
        apart: Folders whose files are nobody's concern.
    """
    sizes: dict[str, int] = {}
    checkpoints: set[str] = set()
    there = Counter[tuple[int, str]]()
    for key, path, facts in _files(str(folder), apart):
        lacks = saved.lacks(path, key) if stat.S_ISREG(facts.st_mode) else None
        sizes[key] = facts.st_size + (lacks or 0)
        if lacks is not None:
            checkpoints.add(_parent(key))
            there[_content(path)] += 1
    gone = [save for save in saved.saves if save.digest and save.path not in sizes]
    there.subtract({save.path: (save.size, save.digest) for save in saved.saves if save.path in sizes}.values())
    for save in gone:
        content = (save.size, save.digest)
        if there[content] > 0:
            there[content] -= 1  # under another name
        elif save.path and not save.path.startswith(apart):  # removed again
            sizes[save.path] = save.size + save.lacks
            checkpoints.add(_parent(save.path))
    by_folder = Counter[str]()
    for key, size in sizes.items():
        by_folder[next((at for at in _parents(key) if at in checkpoints), _parent(key))] += size
    others = {at: size for at, size in sorted(by_folder.items()) if at not in checkpoints}
    return [
        *(Muted(what="checkpoint", where=at, bytes=by_folder[at]) for at in sorted(checkpoints)),
        *(Muted(what="files", where=at, bytes=size) for at, size in _at_most(others, _MOST_FOLDERS).items()),
    ]


def _files(root: str, apart: tuple[str, ...]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield key, path and facts of each file that was made or changed."""
    for at, _, names in os.walk(root):
        for name in names:
            path = f"{at}/{name}"
            key = path[len(root) :]
            facts = os.lstat(path)
            whiteout = stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0
            if not (whiteout or key.startswith(apart) or _is_as_before(key, facts)):
                yield key, path, facts


def _is_as_before(key: str, facts: os.stat_result) -> bool:
    """Whether a file is what really is there: copied to be changed, or because of its folder, and then left alone."""
    try:
        real = os.lstat(key)
    except OSError:
        return False
    if stat.S_ISLNK(facts.st_mode) and stat.S_ISLNK(real.st_mode):
        return facts.st_size == real.st_size
    return (facts.st_size, facts.st_mtime_ns) == (real.st_size, real.st_mtime_ns) or not stat.S_ISREG(
        facts.st_mode | real.st_mode
    )


def _content(path: str) -> tuple[int, str]:
    """Return the size of a file and the SHA-256 of its content."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
            size += len(block)
    return size, found.hexdigest()


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
