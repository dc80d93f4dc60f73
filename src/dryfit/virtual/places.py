"""The line of a script that runs now: the user's own, and the deepest one outside of torch.

Frames are looked at, never kept: a kept frame would keep its tensors.
"""

import linecache
import os
import site
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from dryfit.core.version import PACKAGE_FOLDER


class _Owner(IntEnum):
    HIDDEN = 0
    """torch, dryfit and what Python itself makes."""
    LIBRARY = 1
    USER = 2


_TORCH = str(Path(torch.__file__).parent) + "/"
_DRYFIT = f"{PACKAGE_FOLDER}/"
_LIBRARIES = tuple(
    str(Path(folder)) + "/"
    for folder in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something happens.

    Attributes:
        line: ``path:number`` of the user's own code; empty where none runs.
        source: ``path:number`` of the deepest code outside of torch.
    """

    line: str = ""
    source: str = ""


class Places:
    """Finds the place of the running code.

    Attributes:
        own: A file, or a folder with a separator at its end, that is the user's wherever it lies: what is run.
        folder: Where the script was started: files below it are told relative to it.
    """

    def __init__(self) -> None:
        self.own = ""
        self.folder = f"{Path.cwd()}{os.sep}"
        self._owners: dict[CodeType, _Owner] = {}
        self._texts: dict[tuple[CodeType, int], str] = {}

    def now(self) -> Place:
        """Return the place of the code that called into torch."""
        frame: FrameType | None = sys._getframe(1)
        owners, source = self._owners, ""
        while frame is not None:
            code = frame.f_code
            owner = owners.get(code)
            if owner is None:
                owner = owners[code] = self._owner(code.co_filename)
            if owner is not _Owner.HIDDEN:
                if not source:
                    source = self._text(code, frame.f_lineno)
                if owner is _Owner.USER:
                    return Place(self._text(code, frame.f_lineno), source)
            frame = frame.f_back
        return Place("", source)

    def _owner(self, filename: str) -> _Owner:
        if filename == self.own or (self.own.endswith(os.sep) and filename.startswith(self.own)):
            return _Owner.USER
        if filename.startswith((_TORCH, _DRYFIT, "<")):
            return _Owner.HIDDEN
        if filename.startswith(_LIBRARIES) or any(folder in filename for folder in _PACKAGE_FOLDERS):
            return _Owner.LIBRARY
        if any(filename.startswith(f"{folder}/") and _holds_installed(folder) for folder in sys.path if folder):
            return _Owner.LIBRARY
        return _Owner.USER

    def _text(self, code: CodeType, number: int) -> str:
        key = (code, number)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = f"{code.co_filename.removeprefix(self.folder)}:{number}"
        return text

    def code_of(self, line: str) -> str:
        """Return the text of a line ``path:number``; empty where it cannot be read."""
        path, _, number = line.rpartition(":")
        return linecache.getline(str(Path(self.folder, path)), int(number)).strip() if path else ""


@cache
def _holds_installed(folder: str) -> bool:
    """Whether packages were installed into a folder, as ``pip install --target`` does."""
    return next(Path(folder).glob("*.dist-info"), None) is not None


def runs_in(names: frozenset[str], file_end: str) -> bool:
    """Whether a function of one of these names, in a file that ends so, is running."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(code.co_name in names and code.co_filename.endswith(file_end) for code in codes)
