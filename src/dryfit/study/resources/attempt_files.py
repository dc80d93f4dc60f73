"""Files of ended attempts: the control process takes them over by renames, so no process writes what another reads.

A process that was stopped, or lost sight of, may go on long after its trial has: nothing in its own folder is the
trial's any more, and what it writes there counts for nothing. Everything here can be repeated after a kill at any
point, and ends as if nobody had been killed.
"""

import shutil
from pathlib import Path

from dryfit.core.jobs.job import Job
from dryfit.core.wire import STEP_PREFIX, UNREADABLE_PREFIX, sync_path
from dryfit.scoring.row_files import row_files
from dryfit.store.layout import AttemptLayout, TrialLayout

_KEPT = 2
"""Checkpoints of a trial that stay: the newest, and the one before in case that one is damaged."""


def take_over(trial: TrialLayout, attempt: int, job: Job) -> None:
    """Move an ended attempt's newest checkpoints, best weights and saved model to the trial.

    It is on disk when this returns, so that whatever is recorded of the end afterwards holds. Nothing happens where the
    attempt left nothing, or where this is done already.

    Args:
        trial: The trial, or the final training.
        attempt: The attempt's number, from 1.
        job: What it did. What a user's own code keeps to go on is moved as a whole.
    """
    own = trial.files_of(attempt)
    if job in (Job.OBJECTIVE, Job.TRAINER, Job.SCRIPT):
        _replace(own.checkpoints, trial.checkpoints)
        if job is not Job.OBJECTIVE:
            _replace(own.best, trial.best)
    else:
        _take_checkpoints(trial, attempt)
        _replace(own.best, trial.best)
        for unfinished in trial.best.glob(".*.tmp"):
            unfinished.unlink(missing_ok=True)
        _replace(own.model, trial.folder / own.model.name)
        _take_scored(own, trial)
        if own.load_report.is_file():
            own.load_report.replace(trial.load_report)
    discard(own)


def drop_superseded(trial: TrialLayout, attempt: int) -> None:
    """Remove the trial's checkpoints that a later attempt has superseded.

    Two stay, those of the attempt included. One of a later step than the attempt's first could not be read by it.
    """
    new, before = _steps(trial.files_of(attempt).checkpoints), _steps(trial.checkpoints)
    if not new or not before:
        return
    older = [checkpoint for checkpoint in before if checkpoint.name < new[0].name]
    stay = older[max(0, len(older) + len(new) - _KEPT) :]
    for checkpoint in before:
        if checkpoint not in stay:
            shutil.rmtree(checkpoint, ignore_errors=True)


def discard(own: AttemptLayout) -> None:
    """Remove checkpoints, weights and models from an attempt's folder, partial ones included."""
    for folder in (own.checkpoints, own.best, own.scored, own.model, *own.folder.glob(".*.tmp")):
        shutil.rmtree(folder, ignore_errors=True)


def _take_checkpoints(trial: TrialLayout, attempt: int) -> None:
    own = trial.files_of(attempt)
    for mark in own.checkpoints.glob(f"{UNREADABLE_PREFIX}*"):  # nobody goes on from a checkpoint of another name
        _replace(trial.checkpoints / mark.name.removeprefix(UNREADABLE_PREFIX), trial.checkpoints / mark.name)
    drop_superseded(trial, attempt)
    for checkpoint in _steps(own.checkpoints)[-_KEPT:]:
        trial.checkpoints.mkdir(exist_ok=True)
        _replace(checkpoint, trial.checkpoints / checkpoint.name)


def _take_scored(own: AttemptLayout, trial: TrialLayout) -> None:
    """Take over files of scored rows one by one: an attempt has those of the folds that it finished or began."""
    for file in row_files(own.scored):
        trial.scored.mkdir(exist_ok=True)
        file.replace(trial.scored / file.name)
    if trial.scored.is_dir():
        sync_path(trial.scored)


def _steps(checkpoints: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first."""
    return sorted(checkpoints.glob(f"{STEP_PREFIX}*"))


def _replace(new: Path, place: Path) -> None:
    """Move a folder to its place by one rename; what was there before is removed, and the rename is on disk.

    A kill before that rename leaves the new folder where it was; what was there before may be gone from its place.
    """
    replaced = place.with_name(f".{place.name}.replaced")
    if new.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
        if place.exists():
            place.rename(replaced)
        new.rename(place)
        sync_path(place.parent)
    shutil.rmtree(replaced, ignore_errors=True)
