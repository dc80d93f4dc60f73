"""What of this machine a trial gets: the device it sees, the cores it may use."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def visible_devices(count: int, variable: str | None) -> tuple[str, ...]:
    """Names of the CUDA devices a trial may be given, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Args:
        count: Devices that are there.
        variable: The variable as the user has set it: its devices, and no others, may be used.
    """
    if variable:
        return tuple(name.strip() for name in variable.split(","))[:count]
    return tuple(str(index) for index in range(count))


def least_busy_device(in_use: Sequence[str | None], devices: Sequence[str]) -> str:
    """The device with the fewest running trials, the first of equals.

    Args:
        in_use: The devices of the running trials.
        devices: All of them; each trial sees exactly one.
    """
    return min(devices, key=lambda device: (in_use.count(device), devices.index(device)))


def available_cores(cgroup_cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores this process may really use: its affinity, and the quota of its control group if there is one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cgroup_cpu_max.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
