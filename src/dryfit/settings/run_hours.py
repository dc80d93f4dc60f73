"""Hours of whole runs: from the seconds of a step and the number of steps."""

from typing import Final

from dryfit.settings.rehearsal_messages import Interval, StepTime

_HOUR_S: Final = 3600.0


def run_hours(time: StepTime, steps: int, batch_share: float | None) -> Interval:
    """Return the hours of steps on the loader's mean batch: but for the optimizer they are as long as it is large.

    The upper end of a step that the host may decide does not shrink with the batch.

    Args:
        batch_share: Elements of the mean batch, where those of the timed one are 1; None: not known.
    """
    share = 1.0 if batch_share is None else batch_share

    def hours(step_s: float) -> float:
        fixed_s = min(time.optimizer_s, step_s)
        return steps * (fixed_s + (step_s - fixed_s) * share) / _HOUR_S

    high = hours(time.high_s)
    if time.launch_bound_high_s is not None:
        high = max(high, steps * time.launch_bound_high_s / _HOUR_S)
    return Interval(estimate=hours(time.estimate_s), low=hours(time.low_s), high=high)


def times(hours: Interval, count: int) -> Interval:
    """Return the hours of several runs one after the other; their errors are one."""
    return Interval(estimate=count * hours.estimate, low=count * hours.low, high=count * hours.high)
