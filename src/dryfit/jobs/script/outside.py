"""Files that a script opens for writing outside of its trial's folder, where another trial would overwrite them."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CACHES: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
_SYSTEM: Final = ("/dev", "/proc", "/sys", "/run")
_MOST: Final = 20


@final
class OutsideWrites:
    """Notes what Python code of this process opens for writing; what libraries open in native code is not seen.

    Args:
        own: Folders that belong to the trial.
        work: The folder that the script is run in: what is written there counts wherever it lies.
    """

    def __init__(self, own: Sequence[Path], work: Path) -> None:
        caches = [os.environ[name] for name in _CACHES if name in os.environ]
        self._work = f"{os.path.realpath(work)}{os.sep}"
        self._own = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in own)
        others = (*caches, *_SYSTEM, tempfile.gettempdir(), str(Path.home() / ".cache"))
        self._allowed = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in others)
        self.paths: dict[str, None] = {}

    def install(self) -> None:
        """Watch from now on, until the process ends."""
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or len(self.paths) >= _MOST:
            return
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
        if not writes or not isinstance(path, str | bytes):
            return
        place = os.path.realpath(os.fsdecode(path))
        if place.startswith(self._own) or "__pycache__" in place:
            return
        if place.startswith(self._work) or not place.startswith(self._allowed):
            self.paths[place] = None
