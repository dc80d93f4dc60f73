"""Files of a study on disk: space taken, what ended attempts left, and what is removed."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dryfit.ledger.folder import AttemptLayout, StudyLayout, TrialLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import Ranking
from dryfit.settings.choices import Direction
from dryfit.settings.errors import MachineError
from dryfit.settings.files import sync_path
from dryfit.settings.text import gib
from dryfit.settings.trial import best_first
from dryfit.settings.wire import STEP_PREFIX, UNREADABLE_PREFIX, Job
from dryfit.study.context import StudyContext, possible_values
from dryfit.tasks.scored_rows import row_files

# Files of ended attempts: the control process takes them over by renames, so no process writes what another reads.
#
# A process that was stopped, or lost sight of, may go on long after its trial has: nothing in its own folder is the
# trial's any more, and what it writes there counts for nothing. Everything here can be repeated after a kill at any
# point, and ends as if nobody had been killed.


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


# Removes files of ended trials, except the weights that ``runtime.keep`` asks for and every log.


KEEP_ALL = "all"
KEEP_NONE = "none"
_BEST = "best:"


def most_kept(keep: str) -> int | None:
    """Return how many trials' weights ``runtime.keep`` lets stay; None: all."""
    return None if keep == KEEP_ALL else 0 if keep == KEEP_NONE else int(keep.removeprefix(_BEST))


def _ranking(state: StudyState) -> Ranking:
    sign = -1.0 if state.direction is Direction.MAXIMIZE else 1.0
    first = state.generation.first if state.generations else 0
    return state.history().projected(("ranking", sign), lambda: Ranking(sign, first))


def trials_to_keep(state: StudyState, most: int | None) -> frozenset[int]:
    """Return the numbers of the trials whose weights stay: the best complete ones of each generation.

    Args:
        state: The study.
        most: As :func:`most_kept` says, for each generation; None keeps the pruned and failed ones too.
    """
    if most is None:
        return frozenset(trial.number for trial in state.trials)
    earlier = (
        trial.number
        for generation in state.generations[:-1]
        for trial in best_first(state.in_generation(generation.number), generation.comparability.goals[0].direction)[
            :most
        ]
    )
    return frozenset((*earlier, *_ranking(state).numbers(most)))


def forget_what_is_not_needed(
    layout: StudyLayout, state: StudyState, *, keep: str, just_finished: int | None = None
) -> None:
    """Remove the checkpoints of ended trials, what their attempts left, and the weights that are not to be kept.

    Args:
        layout: Where the study lies.
        state: The study.
        keep: ``runtime.keep``.
        just_finished: Only this trial is new since the last call; None: look at every trial.
    """
    most = most_kept(keep)
    numbers = range(len(state.trials)) if just_finished is None else _touched(state, most, just_finished)
    kept = trials_to_keep(state, most) if most is not None else numbers
    for number in numbers:
        if state.trials[number].outcome is None:
            continue
        paths = layout.trial(number)
        if paths.checkpoints.exists():
            shutil.rmtree(paths.checkpoints, ignore_errors=True)
        for attempt in state.trials[number].attempts:
            discard(paths.files_of(attempt.number))
        if number not in kept and paths.best.exists():
            shutil.rmtree(paths.best, ignore_errors=True)


def _touched(state: StudyState, most: int | None, just_finished: int) -> Sequence[int]:
    """Return the trials whose files may go when one has ended: itself, and the one it has pushed out of the best."""
    pushed_out = _ranking(state).numbers(most + 1)[most:] if most is not None else []
    return [just_finished, *pushed_out]


# The disk space that a study takes at most, checked before it starts. Pure, but for :func:`taken_bytes`.


_GENERATIONS = 3
"""Resumable checkpoints of a trial: the two that stay, whichever attempts wrote them, and the next while it is written.

An earlier attempt's go as soon as the control process hears of a new one (`drop_superseded`).
"""

_STATE_PER_WEIGHT = {"sgd": 1, "lion": 1, "adafactor": 1, "adamw8bit": 1, "paged_adamw8bit": 1}
_STATE_PER_WEIGHT_ELSE = 2
"""Bytes of optimizer state at most for each byte of fp32 weights; two moments unless listed."""


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """The disk space of a study's trials at most; logs and tokens are small beside it.

    Attributes:
        weights_bytes: The weights of one trial: those of the largest encoder, in fp32.
        state_bytes: Its optimizer's state.
        kept: Ended trials whose weights stay.
        running: Trials side by side.
        best_files: Best weights of a running trial: those that ended attempts left, those of the running one, and
            better ones while they are written. None with folds.
    """

    weights_bytes: int
    state_bytes: int
    kept: int
    running: int
    best_files: int = 3

    def with_folds(self, folds: int) -> "DiskNeed":
        """Return the need of a study with so many folds: with more than one, trials leave no weights."""
        return self if folds == 1 else replace(self, kept=0, best_files=0)

    @property
    def kept_bytes(self) -> int:
        """What ended trials keep."""
        return self.kept * self.weights_bytes

    @property
    def running_bytes(self) -> int:
        """What running trials take: best weights, and checkpoints to go on from."""
        checkpoint_bytes = self.weights_bytes + self.state_bytes
        return self.running * (self.best_files * self.weights_bytes + _GENERATIONS * checkpoint_bytes)

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.kept_bytes + self.running_bytes


def disk_need(
    weights_bytes: Sequence[int], optimizers: Sequence[str], *, keep: str, trials: int, parallel: int
) -> DiskNeed:
    """Return an upper bound of a study's disk space.

    Args:
        weights_bytes: Of each encoder that a trial may train; none known: 0 is needed.
        optimizers: ``optim.name`` of each optimizer that a trial may use.
        keep: ``runtime.keep``.
        trials: The study's total.
        parallel: Most trials side by side.
    """
    largest_bytes = max(weights_bytes, default=0)
    state = max((_STATE_PER_WEIGHT.get(name, _STATE_PER_WEIGHT_ELSE) for name in optimizers), default=0)
    most = most_kept(keep)
    return DiskNeed(
        weights_bytes=largest_bytes,
        state_bytes=state * largest_bytes,
        kept=trials if most is None else min(most, trials),
        running=min(parallel, trials),
    )


def study_need(study: StudyContext) -> DiskNeed:
    """Return an upper bound of a study's disk space over all models and optimizers of its space."""
    config = study.config
    return disk_need(
        list(study.resolved.weights_bytes.values()),
        possible_values(config, study.space, "optim.name"),
        keep=config.runtime.keep,
        trials=config.study.trials,
        parallel=study.parallelism.most,
    ).with_folds(config.data.folds)


def what_fits(need: DiskNeed, free_bytes: int) -> str:
    """Return the smallest change that makes a study fit its disk; empty if none does.

    Args:
        need: The need without a change.
        free_bytes: What is free, its own files included.
    """
    if need.running_bytes <= free_bytes:
        kept = (free_bytes - need.running_bytes) // max(1, need.weights_bytes)
        return f"--set runtime.keep={f'best:{kept}' if kept else KEEP_NONE}"
    alone = replace(need, kept=0, running=1)
    running = free_bytes // max(1, alone.running_bytes)
    keep = f"--set runtime.keep={KEEP_NONE} " if need.best_files else ""  # with folds there are no weights to keep
    return f"{keep}--set runtime.parallel={running}" if running else ""


def check_disk(need: DiskNeed, *, free_bytes: int, taken_bytes: int, place: Path) -> None:
    """Refuse a study that does not fit its disk.

    Args:
        need: The need of the study.
        free_bytes: What is free on its disk.
        taken_bytes: What its trials have there already; a part of the need.
        place: Its folder, for the message.

    Raises:
        MachineError: There is too little, with numbers and what would fit.
    """
    usable_bytes = free_bytes + taken_bytes
    if need.total_bytes <= usable_bytes:
        return
    kept = f"{need.kept} kept x {gib(need.weights_bytes)} = {gib(need.kept_bytes)}"
    running = f"{need.running} running = {gib(need.running_bytes)} (best weights, checkpoints with optimizer state)"
    fits = what_fits(need, usable_bytes)
    raise MachineError(
        f"checking the disk under {place}",
        f"the study takes up to {gib(need.total_bytes)}: {kept}, {running}; "
        f"there are {gib(free_bytes)} free, and {gib(taken_bytes)} its own already",
        allowed="a disk with room for that",
        hint=f"it fits with {fits}; or free some space" if fits else "free some space, or put the study elsewhere",
    )


def taken_bytes(layout: StudyLayout) -> int:
    """Return the bytes of trials' weights and checkpoints; files that vanish meanwhile do not count."""
    total_bytes = 0
    for pattern in ("*/best/*", "*/checkpoints/*/*", "*/attempt-*/best/*", "*/attempt-*/checkpoints/*/*"):
        for path in layout.trials.glob(pattern):
            try:
                total_bytes += path.stat().st_size
            except FileNotFoundError:
                continue
    return total_bytes
