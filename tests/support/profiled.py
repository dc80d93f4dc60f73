"""What torch's profiler sees a piece of work take of the CPU's memory."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(deltas: Sequence[int]) -> int:
    """The highest running sum."""
    live = highest = 0
    for delta in deltas:
        live += delta
        highest = max(highest, live)
    return highest


def profiled_peak_bytes(work: Callable[[], object]) -> int:
    """The most that work takes beside what lives before it; nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
            work()
    finally:
        gc.enable()
    events: list[Any] = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    return peak_bytes([one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())])
