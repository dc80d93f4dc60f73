"""Resumable checkpoints, complete or absent, whenever the process is killed.

A folder is written under a temporary name, made durable, and gets its name by one rename. Its manifest has a hash of
each file and of itself: 128 bits of xxh3, which detect every accident and cost a tenth of SHA-256. They are
no protection against intent.

An attempt writes and removes checkpoints in a folder of its own alone. It goes on from those that the control process
keeps of the attempts before it, and changes nothing there.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
import xxhash
from safetensors import SafetensorError

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import CheckpointError, CorruptCheckpointError, LoadError
from dryfit.settings.files import publishing
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.trial import FoldScore, MetricPoint
from dryfit.settings.wire import STEP_PREFIX, UNREADABLE_PREFIX, Checkpointed, Note, Phase, canonical_json
from dryfit.training.run import FoldPosition

_FORMAT = 1
_MANIFEST = "manifest.json"
_KEPT = 2
_HASH_BLOCK_BYTES = 1 << 20

_UNREADABLE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    pickle.UnpicklingError,
    SafetensorError,
    LoadError,
)
"""What reading a state's files raises where they are not what they should be."""

_NOT_THE_FILES = (torch.OutOfMemoryError, torch.AcceleratorError)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        folder: Its files, as the Trainer writes and reads them.
        step: Optimizer steps done, of all folds.
        points: The validations reported before it was written; with folds those of the one it is within.
        folds: What the folds have come to that are done; those of a trial that trains once are none.
    """

    folder: Path
    step: int
    points: tuple[MetricPoint, ...]
    folds: tuple[FoldScore, ...] = ()

    @property
    def fold_step(self) -> int:
        """Optimizer steps done within the fold that it is of; 0: it stands between two folds, and has no state."""
        return self.step - sum(fold.steps for fold in self.folds)


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    fingerprint: str,
    points: tuple[MetricPoint, ...],
    write: Callable[[Path], None],
    folds: tuple[FoldScore, ...] = (),
) -> Path:
    """Write a checkpoint and remove all but this one and the one before.

    Args:
        directory: All checkpoints of the attempt.
        step: Optimizer steps done, of all folds.
        fingerprint: What identifies the trial; a checkpoint of another one is refused on reading.
        points: Validations so far; with folds those of the one that is trained.
        write: Writes the state's files into a folder it is given.
        folds: What the folds have come to that are done.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It cannot be written; what was written of it is removed, and those before are untouched.
    """
    final = directory / f"{STEP_PREFIX}{step:08d}"
    _remove_leftovers(directory)
    with publishing(final) as temporary:
        write(temporary)
        manifest = {
            "format": _FORMAT,
            "step": step,
            "fingerprint": fingerprint,
            "points": [asdict(point) for point in points],
            "folds": [asdict(fold) for fold in folds],
            "files": {path.name: _facts(path) for path in sorted(temporary.iterdir())},
        }
        text = canonical_json(manifest).encode()
        # The manifest vouches for itself too, so that no flipped bit in the reports goes unseen.
        (temporary / _MANIFEST).write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
    _remove_others(directory, final)
    return final


def newest_good(
    directory: Path, fingerprint: str, send: Callable[[str], None] = lambda _: None, *, computed: str = ""
) -> Checkpoint | None:
    """Return the newest checkpoint whose files are all as they were written; None where there is none.

    Args:
        directory: The checkpoints that ended attempts left.
        fingerprint: What identifies the trial.
        send: Called with a text for each damaged checkpoint, and what is done without it.
        computed: What its configuration is hashed to now. dryfit 0.1.0 wrote that of its own time into checkpoints,
            whatever the trial was recorded with; where they are equal, all that is learned is.

    Raises:
        CheckpointError: A good checkpoint belongs to another trial.
    """
    damaged: list[str] = []
    for folder in _folders(directory):
        try:
            manifest = _manifest(folder)
        except _DamagedError as error:
            damaged.append(f"the checkpoint {folder.name} is damaged ({error})")
            continue
        if manifest["fingerprint"] not in (fingerprint, computed):
            raise CheckpointError(
                f"going on from {folder}",
                f"it belongs to a trial with fingerprint {manifest['fingerprint']}",
                allowed=f"a checkpoint of the trial with fingerprint {fingerprint}",
                hint="remove the folder, or give the trial another one",
            )
        points = tuple(MetricPoint(**point) for point in manifest["points"])
        for text in damaged:
            send(f"{text}: going on from step {manifest['step']}, the one before")
        folds = tuple(FoldScore.from_json(fold) for fold in manifest.get("folds", ()))  # none before there were some
        return Checkpoint(folder=folder, step=manifest["step"], points=points, folds=folds)
    for text in damaged:
        send(f"{text}, and there is no good one before: beginning anew")
    return None


def newest_checkpoint(request: TrainRequest, channel: ChildChannel) -> Checkpoint | None:
    """Return the checkpoint that a trial goes on from; None: it begins anew. A note is sent of each damaged one."""

    def send(text: str) -> None:
        channel.send(Note(text=text))

    kept = Path(request.kept_checkpoint_dir)
    return newest_good(kept, request.fingerprint, send, computed=request.config.fingerprint)


def save_between_folds(request: TrainRequest, channel: ChildChannel, position: FoldPosition) -> None:
    """Write a checkpoint of the folds that are done; the next one begins with nothing else."""
    step = position.steps_before
    channel.send(Phase(name="save", step=step))
    save_checkpoint(
        Path(request.checkpoint_dir),
        step=step,
        fingerprint=request.fingerprint,
        points=(),
        write=lambda _: None,
        folds=position.done,
    )
    channel.send(Checkpointed(step=step))
    channel.send(Phase(name="load", step=step))


@final
class Reading(AbstractContextManager[None]):
    """Guards the reading of a verified checkpoint: of one that cannot be read it leaves a mark for the next attempt.

    Args:
        folder: The checkpoint; None: nothing is read.
        own: The attempt's own folder of checkpoints, for the mark: the checkpoint itself is another attempt's.
    """

    def __init__(self, folder: Path | str | None, own: Path) -> None:
        self._folder = None if folder is None else Path(folder)
        self._own = own

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Turn an error of reading into one that says that the checkpoint is damaged.

        Raises:
            CorruptCheckpointError: It cannot be read.
        """
        folder = self._folder
        if folder is None or not isinstance(error, _UNREADABLE) or isinstance(error, _NOT_THE_FILES):
            return
        said = next(iter(str(error).strip().splitlines()), "no message")
        with suppress(OSError):
            (self._own / (UNREADABLE_PREFIX + folder.name)).mkdir(parents=True, exist_ok=True)
        raise CorruptCheckpointError(
            f"going on from {folder}",
            f"it cannot be read ({type(error).__name__}: {said})",
            allowed="a checkpoint that these versions of torch and transformers can read",
            hint="the next attempt goes on from the one before it, or begins anew",
        ) from error


def _folders(directory: Path) -> list[Path]:
    """Return all checkpoints, newest first, verified or not."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if path.name.startswith(STEP_PREFIX)), reverse=True)


class _DamagedError(Exception):
    """A checkpoint is not as it was written."""


def _manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and check that it and all files it names are as they were written.

    Raises:
        _DamagedError: They are not.
    """
    try:
        digest, _, text = (folder / _MANIFEST).read_bytes().partition(b"\n")
        if digest.decode("ascii", "replace") != xxhash.xxh3_128_hexdigest(text):
            raise _DamagedError(f"{_MANIFEST}: its hash is another")
        manifest = json.loads(text)
        if manifest["format"] != _FORMAT:
            raise _DamagedError(f"format {manifest['format']}, not {_FORMAT}")
        for name, facts in manifest["files"].items():
            facts_now = _facts(folder / name)
            if facts_now["size"] != facts["size"]:
                raise _DamagedError(f"{name}: {facts_now['size']} bytes, not {facts['size']}")
            if facts_now != facts:
                raise _DamagedError(f"{name}: its hash is another")
    except OSError as error:
        name = Path(str(error.filename)).name
        raise _DamagedError(f"{name}: {error.strerror}") from error
    return manifest


def _remove_others(directory: Path, newest: Path) -> None:
    """Remove all but the newest checkpoint and the one before it.

    One of a later step could not be read, or this attempt had gone on from it.
    """
    before = [folder for folder in _folders(directory) if folder.name < newest.name]
    for folder in _folders(directory):
        if folder != newest and folder not in before[: _KEPT - 1]:
            shutil.rmtree(folder)


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
    for path in directory.glob(f".{STEP_PREFIX}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
