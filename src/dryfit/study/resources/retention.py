"""Removes files of ended trials, except the weights that ``runtime.keep`` asks for and every log."""

import shutil
from collections.abc import Sequence

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import best_first
from dryfit.store.history import Ranking
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.study.resources.attempt_files import discard

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
