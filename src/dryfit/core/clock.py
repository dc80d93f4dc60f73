"""The time of day that a run goes by."""

import time
from collections.abc import Callable

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts while the machine sleeps too; nobody can set it."""


def since_boot_s() -> float:
    """Seconds of a clock that only ever goes on."""
    return time.clock_gettime(_SINCE_BOOT)


def steady_clock(steady: Callable[[], float] = since_boot_s) -> Callable[[], float]:
    """A clock that gives Unix seconds and does not jump where the machine's own is set back or forward.

    Waits and time limits that are counted in Unix seconds would otherwise last a day longer, or be over at once, where
    somebody sets the clock.
    """
    offset_s = time.time() - steady()
    return lambda: steady() + offset_s
