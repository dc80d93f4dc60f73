"""A stand-in for the module pynvml: one device, and a driver that is as the files of a folder say; see ``nvml.Driver``.

Only processes that have this folder on their ``PYTHONPATH`` find it.
"""

import os
import time
from pathlib import Path
from typing import Any

from nvml import Board, FakeNvml, read_processes

_FOLDER = Path(os.environ["DRYFIT_TEST_DRIVER"])
_board = Board("GPU-a", total=1 << 30, reserved=0)
_fake = FakeNvml(_board)


def nvmlDeviceGetMemoryInfo(board: Board, version: int | None = None) -> Any:
    """As the module's, but that it may hang, or take the process with it."""
    with (_FOLDER / "looks").open("a") as looks:
        looks.write("look\n")
    while (_FOLDER / "hangs").exists():
        time.sleep(0.05)
    if (_FOLDER / "dies").exists():
        os._exit(3)
    board.processes = read_processes(_FOLDER)
    return _fake.nvmlDeviceGetMemoryInfo(board, version)


def __getattr__(name: str) -> Any:
    return getattr(_fake, name)
