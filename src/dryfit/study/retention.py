"""Which files of ended trials stay: the weights of the best few, and every log."""

import shutil

from dryfit.core.settings import Direction
from dryfit.core.trial import Outcome
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState


def trials_to_keep(state: StudyState, keep_best: int) -> frozenset[int]:
    """Numbers of the trials whose weights stay: the best complete ones, the earlier of equals."""
    sign = -1.0 if state.direction is Direction.MAXIMIZE else 1.0
    complete = [
        (sign * trial.value, trial.number)
        for trial in state.trials
        if trial.outcome is Outcome.COMPLETE and trial.value is not None
    ]
    return frozenset(number for _, number in sorted(complete)[:keep_best])


def forget_what_is_not_needed(
    layout: StudyLayout, state: StudyState, *, keep_best: int, just_finished: int | None = None
) -> None:
    """Remove the checkpoints of ended trials, and the weights of those that are no longer among the best.

    Args:
        just_finished: Only this trial is new since the last call; None: look at every trial.
    """
    kept = trials_to_keep(state, keep_best)
    if just_finished is None:
        numbers = frozenset(trial.number for trial in state.trials)
    else:  # the one it has pushed out, if any, is the next best
        numbers = trials_to_keep(state, keep_best + 1) | {just_finished}
    for number in numbers:
        if state.trials[number].outcome is None:
            continue
        paths = layout.trial(number)
        if paths.checkpoints.exists():
            shutil.rmtree(paths.checkpoints, ignore_errors=True)
        if number not in kept and paths.best.exists():
            shutil.rmtree(paths.best, ignore_errors=True)
