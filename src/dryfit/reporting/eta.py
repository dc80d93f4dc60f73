"""Estimates of the time a trial and a study still need; None where too little has been observed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_STEPS = 2
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The progress of a running trial between two observations.

    Attributes:
        first_step: Steps done at the first observation of this process, those before its checkpoint included.
        step: Steps done now.
        total_steps: Steps of the whole trial; 0 if unknown.
        elapsed_s: Seconds between the observations, validations and checkpoints included.
    """

    first_step: int
    step: int
    total_steps: int
    elapsed_s: float

    @property
    def fraction(self) -> float:
        """The share of the trial that is done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A running trial, for the study's estimate.

    Attributes:
        elapsed_s: Seconds since its process was placed.
        pace: Its progress.
    """

    elapsed_s: float
    pace: Pace


def trial_left_s(pace: Pace) -> float | None:
    """Return the seconds to the trial's last step at its present pace, early stopping left aside."""
    done = pace.step - pace.first_step
    if pace.total_steps <= 0 or done < _LEAST_STEPS or pace.elapsed_s < _LEAST_S:
        return None
    return max(0, pace.total_steps - pace.step) * pace.elapsed_s / done


def expected_end(reached: float, ends: Sequence[float]) -> float:
    """Return the share of its steps after which a trial will end: the mean of the earlier ends beyond its own progress.

    Args:
        reached: The share it has done.
        ends: Shares after which earlier trials ended; below 1 for pruned and early-stopped ones.
    """
    return statistics.fmean([end for end in ends if end > reached] or [1.0])


def study_left_s(
    *,
    waiting: int,
    running: Sequence[Running],
    finished_s: Sequence[float],
    ends: Sequence[float] = (),
    parallel: int = 1,
) -> float | None:
    """Return the seconds to the end of a study whose further trials are like those before.

    Args:
        waiting: Number of trials without a process.
        running: Trials with a process.
        finished_s: Time of each finished trial, pruned and failed ones included.
        ends: As in :func:`expected_end`.
        parallel: Number of trials that run side by side.
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
    # No schedule is shorter than the longest trial, or than all work divided by all slots.
    return max([work_s / max(1, parallel), guess_s if waiting else 0.0, *known])


def _expected_left_s(trial: Running, ends: Sequence[float]) -> float | None:
    left_s = trial_left_s(trial.pace)
    fraction = trial.pace.fraction
    if left_s is None or fraction >= 1:
        return left_s
    return left_s * (expected_end(fraction, ends) - fraction) / (1 - fraction)


def _typical_s(running: Sequence[Running], lefts: Sequence[float | None], finished_s: Sequence[float]) -> float | None:
    """Return the mean time of a trial: of the finished ones, else of the expected times of the running ones."""
    expected_s = [trial.elapsed_s + left for trial, left in zip(running, lefts, strict=True) if left is not None]
    times_s = finished_s or expected_s
    return statistics.fmean(times_s) if times_s else None
