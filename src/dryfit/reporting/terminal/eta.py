"""How long a trial and a study will still take: pure functions of what has been seen; None where that is too little."""

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_STEPS = 2
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How a running trial moves.

    Attributes:
        first_step: Steps done when it was first looked at in this process: those before a checkpoint included.
        step: Steps done now.
        total_steps: Steps of the whole trial; 0: unknown.
        elapsed_s: Seconds between both looks, validations and checkpoints included.
    """

    first_step: int
    step: int
    total_steps: int
    elapsed_s: float

    @property
    def fraction(self) -> float:
        """How much of the trial is done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A running trial, for the study's estimate.

    Attributes:
        elapsed_s: Since its process was placed.
        pace: How it moves.
    """

    elapsed_s: float
    pace: Pace


def trial_left_s(pace: Pace) -> float | None:
    """Seconds to the trial's last step at the pace of this process; an early end is not foreseen."""
    done = pace.step - pace.first_step
    if pace.total_steps <= 0 or done < _LEAST_STEPS or pace.elapsed_s < _LEAST_S:
        return None
    return max(0, pace.total_steps - pace.step) * pace.elapsed_s / done


def expected_end(reached: float, ends: Sequence[float]) -> float:
    """The fraction of its steps at which a trial will end, judged by the trials that came further than it has.

    Args:
        reached: The fraction it has done.
        ends: Fractions at which earlier trials ended: below 1 where pruning or early stopping cut them short.
    """
    further = [end for end in ends if end > reached]
    return sum(further) / len(further) if further else 1.0


def study_left_s(
    *,
    waiting: int,
    running: Sequence[Running],
    finished_s: Sequence[float],
    ends: Sequence[float] = (),
    parallel: int = 1,
) -> float | None:
    """Seconds to the end of a study, if trials go on to be like those before them.

    Args:
        waiting: Trials that have no process yet.
        running: Those that have one.
        finished_s: What each finished trial took; pruned and failed ones belong to what a trial takes.
        ends: As in :func:`expected_end`.
        parallel: Trials side by side.
    """
    lefts = [_expected_left_s(trial, ends) for trial in running]
    typical_s = _typical_s(running, lefts, finished_s)
    if typical_s is None and (waiting or None in lefts):
        return None
    guess_s = typical_s or 0.0
    known = [
        max(0.0, guess_s - trial.elapsed_s) if left is None else left
        for trial, left in zip(running, lefts, strict=True)
    ]
    work_s = sum(known) + waiting * guess_s
    # No schedule is shorter than the longest trial, nor than all work on all places.
    return max([work_s / max(1, parallel), guess_s if waiting else 0.0, *known])


def _expected_left_s(trial: Running, ends: Sequence[float]) -> float | None:
    left_s = trial_left_s(trial.pace)
    fraction = trial.pace.fraction
    if left_s is None or fraction >= 1:
        return left_s
    return left_s * (expected_end(fraction, ends) - fraction) / (1 - fraction)


def _typical_s(running: Sequence[Running], lefts: Sequence[float | None], finished_s: Sequence[float]) -> float | None:
    """What a trial takes: the mean of the finished ones, else of what the running ones will have taken."""
    seen = list(finished_s)
    if not seen:
        seen = [trial.elapsed_s + left for trial, left in zip(running, lefts, strict=True) if left is not None]
    return sum(seen) / len(seen) if seen else None
