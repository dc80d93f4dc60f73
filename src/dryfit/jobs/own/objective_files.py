"""An attempt's own copy of what the attempts before it left for a user's function to go on from."""

import os
import shutil
from pathlib import Path

from dryfit.core.errors import CheckpointError, FileError
from dryfit.core.jobs.train import ObjectiveRequest
from dryfit.core.regular_files import read_bounded
from dryfit.core.text.json_text import parse_json
from dryfit.core.wire import canonical_json, sync_path

TRIAL_FILE = ".dryfit-trial.json"
"""In a folder of checkpoints: the trial that it belongs to."""

_MOST_BYTES = 1 << 16


def make_checkpoint_folder(body: ObjectiveRequest, *, anew: bool = False) -> None:
    """Make the folder in which an attempt keeps what it needs to go on, with all that those before it left.

    It is a copy: what an earlier attempt's process may still write cannot reach it. It gets its name by one rename,
    complete and on disk.

    Args:
        body: The call of the user's code.
        anew: It begins empty, as nothing of what is left there is known to be whole.

    Raises:
        CheckpointError: What is there belongs to another trial.
        OSError: It cannot be written; what was written of it is removed.
    """
    own, kept = Path(body.checkpoint_dir), Path(body.kept_checkpoint_dir)
    for folder in (own, kept):
        _refuse_other_trial(folder, body.fingerprint)
    if own.is_dir():
        return
    temporary = own.with_name(f".{own.name}.{os.getpid()}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if kept.is_dir() and not anew:
            _copy(kept, temporary)
        else:
            temporary.mkdir()
        text = canonical_json({"fingerprint": body.fingerprint, "trial": body.number})
        (temporary / TRIAL_FILE).write_text(text, encoding="utf-8")
        for path in (temporary / TRIAL_FILE, temporary):
            sync_path(path)
        temporary.rename(own)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs its space back
    sync_path(own.parent)


def _refuse_other_trial(folder: Path, fingerprint: str) -> None:
    """Refuse a folder of another trial; one of an earlier dryfit says nothing of its trial.

    Raises:
        CheckpointError: It belongs to another trial.
    """
    try:
        found = parse_json(read_bounded(folder / TRIAL_FILE, _MOST_BYTES).decode())["fingerprint"]
    except FileNotFoundError:
        return
    except (FileError, ValueError, LookupError, TypeError):
        found = "that cannot be read"
    if found != fingerprint:
        raise CheckpointError(
            f"going on from {folder}",
            f"{TRIAL_FILE} in it is of a trial with fingerprint {found}",
            allowed=f"a folder of the trial with fingerprint {fingerprint}",
            hint="remove the folder, or search in another study folder",
        )


def _copy(source: Path, target: Path) -> None:
    """Copy a folder to disk. Links stay links; pipes and sockets are left out, as nobody is at their other end."""
    target.mkdir()
    for path in source.iterdir():
        copy = target / path.name
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.is_dir():
            _copy(path, copy)
        elif path.is_file():
            shutil.copy2(path, copy)
            sync_path(copy)
    sync_path(target)
