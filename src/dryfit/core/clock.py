"""A clock in Unix seconds that does not jump when the system time is set."""

import time
from collections.abc import Callable

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Also counts while the machine sleeps, and cannot be set."""


def since_boot_s() -> float:
    """Return the seconds of a clock that is never set."""
    return time.clock_gettime(_SINCE_BOOT)


def steady_clock(steady: Callable[[], float] = since_boot_s) -> Callable[[], float]:
    """Return a clock in Unix seconds that does not jump when the system time is set.

    Otherwise a wait or a time limit could last a day longer, or end at once, when somebody sets the time.
    """
    offset_s = time.time() - steady()
    return lambda: steady() + offset_s
