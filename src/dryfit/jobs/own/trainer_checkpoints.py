"""Checkpoints that a Trainer of the user's own writes: each is marked once it is whole, and no other is used."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from dryfit.core.errors import FileError
from dryfit.core.wire import Wire, read_model, sync_tree, write_model

MARK_FILE: Final = ".dryfit-checkpoint.json"
"""In a checkpoint of which every file is on disk: the last one written."""

_PREFIX: Final = "checkpoint-"


class Evaluation(Wire):
    """The numbers of one evaluation."""

    step: int
    epoch: float
    metrics: dict[str, float]


class CheckpointMark(Wire):
    """What a whole checkpoint says of itself.

    Attributes:
        step: Optimizer steps done.
        done: Training had ended: nothing is left to train.
        evaluations: All evaluations so far, those of earlier attempts included.
        sizes: Sizes of its files in bytes, by their paths in it.
    """

    step: int
    done: bool
    evaluations: tuple[Evaluation, ...]
    sizes: dict[str, int]


def mark_whole(folder: Path, *, step: int, done: bool, evaluations: Sequence[Evaluation]) -> None:
    """Mark a checkpoint that the Trainer has just finished, after its files are on disk.

    Raises:
        OSError: They cannot be brought there.
    """
    sync_tree(folder)
    mark = CheckpointMark(step=step, done=done, evaluations=tuple(evaluations), sizes=_sizes(folder))
    write_model(folder / MARK_FILE, mark)


def newest_whole(folder: Path) -> tuple[Path, CheckpointMark] | None:
    """Return the newest checkpoint that is whole; None: there is none.

    The others in the folder, which must be the caller's own, are removed, and those that stay are given times in the
    order of their steps: by these the Trainer finds the oldest.
    """
    whole: list[tuple[Path, CheckpointMark]] = []
    for checkpoint in folder.glob(f"{_PREFIX}*"):
        mark = _mark_of(checkpoint)
        if mark is None:
            shutil.rmtree(checkpoint, ignore_errors=True)
        else:
            os.utime(checkpoint, (mark.step, mark.step))
            whole.append((checkpoint, mark))
    return max(whole, key=lambda each: each[1].step, default=None)


def _mark_of(checkpoint: Path) -> CheckpointMark | None:
    try:
        mark = read_model(checkpoint / MARK_FILE, CheckpointMark)
    except (FileError, ValidationError, NotADirectoryError):
        return None
    return mark if mark is not None and mark.sizes == _sizes(checkpoint) else None


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK_FILE)
