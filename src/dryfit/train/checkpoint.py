"""Resumable checkpoints: complete or not there, whatever is killed when."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from dryfit.core.errors import CheckpointError
from dryfit.core.trial import MetricPoint
from dryfit.core.wire import canonical_json, sync_folder

_FORMAT = 1
_MANIFEST = "manifest.json"
_PREFIX = "step-"
_KEPT = 2
_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        folder: Its files, as the Trainer writes and reads them.
        step: Optimizer steps done.
        points: The validations reported before it was written.
    """

    folder: Path
    step: int
    points: tuple[MetricPoint, ...]


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    fingerprint: str,
    points: tuple[MetricPoint, ...],
    write: Callable[[Path], None],
) -> Path:
    """Write a checkpoint and remove all but the newest two.

    Args:
        directory: All checkpoints of the trial.
        step: Optimizer steps done.
        fingerprint: Of the trial's config; a checkpoint of another trial is refused on reading.
        points: Validations reported so far.
        write: Writes the state's files into a folder it is given.

    Returns:
        The checkpoint's folder.
    """
    final = directory / f"{_PREFIX}{step:08d}"
    temporary = directory / f".{final.name}.{os.getpid()}.tmp"
    _remove_leftovers(directory)
    temporary.mkdir(parents=True)
    write(temporary)
    manifest = {
        "format": _FORMAT,
        "step": step,
        "fingerprint": fingerprint,
        "points": [asdict(point) for point in points],
        "files": {path.name: _facts(path) for path in sorted(temporary.iterdir())},
    }
    text = canonical_json(manifest).encode()
    # The manifest vouches for itself too, so that no flipped bit in the reports goes unseen.
    (temporary / _MANIFEST).write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
    if final.exists():  # the same step, of an attempt that went on from an older checkpoint: replace it
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(directory)
    for old in _folders(directory)[_KEPT:]:
        shutil.rmtree(old)
    return final


def newest_good(directory: Path, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint whose files are all as they were written; None where there is none.

    Raises:
        CheckpointError: A good checkpoint belongs to another trial.
    """
    for folder in _folders(directory):
        manifest = _verified(folder)
        if manifest is None:
            continue
        if manifest["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"going on from {folder}",
                f"it belongs to a trial with fingerprint {manifest['fingerprint']}",
                allowed=f"a checkpoint of the trial with fingerprint {fingerprint}",
                hint="remove the folder, or give the trial another one",
            )
        points = tuple(MetricPoint(**point) for point in manifest["points"])
        return Checkpoint(folder=folder, step=manifest["step"], points=points)
    return None


def _folders(directory: Path) -> list[Path]:
    """All checkpoints, newest first, verified or not."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if path.name.startswith(_PREFIX)), reverse=True)


def _verified(folder: Path) -> dict | None:
    try:
        digest, _, text = (folder / _MANIFEST).read_bytes().partition(b"\n")
        if digest.decode("ascii", "replace") != xxhash.xxh3_128_hexdigest(text):
            return None
        manifest = json.loads(text)
        good = manifest["format"] == _FORMAT and all(
            _facts(folder / name) == facts for name, facts in manifest["files"].items()
        )
    except OSError:  # a file is missing or unreadable
        return None
    return manifest if good else None


def _facts(path: Path) -> dict[str, int | str]:
    state = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            state.update(block)
            size_bytes += len(block)
    return {"size": size_bytes, "xxh3": state.hexdigest()}


def _remove_leftovers(directory: Path) -> None:
    """Remove what a killed attempt left half written; one trial has one writer."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(f".{_PREFIX}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
