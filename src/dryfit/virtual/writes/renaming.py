"""Renames that overlayfs cannot do: of a folder that was there before, and between two overlays.

The kernel answers as it does between file systems (``EXDEV``). ``mv`` and ``shutil.move`` copy then, and so does what
stands for ``os.rename`` here, as for most users both places are on one file system.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from dryfit.virtual.writes.replacing import named_as


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
