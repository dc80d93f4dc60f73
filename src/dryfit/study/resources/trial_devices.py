"""The devices and cores of this machine that trials may use."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.jobs.train import ResolveResult
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.sharding.device_groups import check_enough, overlap, places_of
from dryfit.core.sharding.rank_search import AUTO, degrees_within

_SMI_TIMEOUT_S = 20.0
_SMI_END_S = 2.0
_MOST_PARALLEL = 256

CPU_THREADS = 4
"""Cores of a trial on the CPU where ``execution.threads`` is unset and ``runtime.parallel`` is "auto"."""

CUDA_THREADS = 2
"""The same for a trial on a GPU: one core to launch kernels, one for everything else."""


def visible_devices(count: int, variable: str | None) -> tuple[str, ...]:
    """Names of the CUDA devices a trial may be given, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Args:
        count: Devices that are there.
        variable: The variable as the user has set it: its devices, and no others, may be used.
    """
    if variable:
        return tuple(name.strip() for name in variable.split(","))[:count]
    return tuple(str(index) for index in range(count))


def device_uuids(resolved: ResolveResult, variable: str | None) -> dict[str, str]:
    """Return the UUID of each device name, if RESOLVE has asked CUDA; else nothing."""
    if len(resolved.device_uuids) != resolved.device_count:
        return {}
    return dict(zip(visible_devices(resolved.device_count, variable), resolved.device_uuids, strict=True))


def choose_device(resolved: ResolveResult, in_use: Sequence[str | None], *, processes: int) -> str | None:
    """Return the CUDA device, or group of them, with the fewest running trials, where nothing is known of memory.

    Args:
        resolved: Facts about the machine.
        in_use: The devices, or groups, of the running trials.
        processes: Processes of each trial; every one gets a device of its own.

    Returns:
        The first of the least busy; None on a machine without CUDA devices.

    Raises:
        MachineError: There are fewer devices than a trial has processes.
    """
    if resolved.device is not DeviceKind.CUDA:
        return None
    check_enough(resolved.device_count, processes)
    names = visible_devices(resolved.device_count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return min(places_of(names, processes), key=lambda place: sum(overlap(other, place) for other in in_use))


def named_gpu(name: str, variable: str | None) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` for a process that is to see one device only.

    Args:
        name: ``cuda`` or ``cuda:N``.
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.

    Raises:
        ConfigError: It is no such name.
        MachineError: The variable lists fewer devices.
    """
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name.strip())
    if match is None:
        raise ConfigError("choosing a GPU", f"{name!r}", "cuda, cuda:0, cuda:1, ...")
    index = int(match[1] or 0)
    if variable is None:
        return str(index)
    listed = [part.strip() for part in variable.split(",") if part.strip()]
    if index >= len(listed):
        raise MachineError(
            f"looking for {name}",
            f"CUDA_VISIBLE_DEVICES is {variable!r}",
            f"cuda:0 to cuda:{len(listed) - 1}" if listed else "",
            "unset it, or name one of its devices",
        )
    return listed[index]


def available_cores(cgroup_cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the CPU cores this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cgroup_cpu_max.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def first_gpu(variable: str | None) -> DeviceSpec | None:
    """Return the GPU that a trial would see first; None if there is none, or no driver.

    The driver's own tool is asked: it is there wherever a driver is, and needs neither torch nor a CUDA context. It
    counts what the driver keeps for itself, which no program can have.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    first = visible_devices(1, variable)[0]
    if variable is not None and not variable.strip():
        return None
    said = _query_driver("name,memory.total,memory.reserved,compute_cap", "-i", first)
    try:
        name, total_mib, reserved_mib, capability = (part.strip() for part in said.splitlines()[0].split(","))
        major, minor = map(int, capability.split("."))
        capacity_bytes = (int(total_mib) - int(reserved_mib)) * 2**20
    except (ValueError, IndexError):
        return None
    return DeviceSpec(name=name, capacity_bytes=capacity_bytes, capability=(major, minor))


def gpu_count(variable: str | None) -> int:
    """Return how many GPUs trials may use, as the driver's own tool counts them; 0 without a driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    if variable is not None and not variable.strip():
        return 0
    count = sum(line.strip().isdigit() for line in _query_driver("index").splitlines())
    return len(visible_devices(count, variable))


def _query_driver(query: str, *options: str) -> str:
    """Return the output of the driver's own tool; empty if there is none, it fails, or the driver hangs.

    A process stuck in a driver outlives its kill, and ``subprocess.run`` would wait for its end: this does not.
    """
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *options]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    try:
        said, _ = process.communicate(timeout=_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_SMI_END_S)
        return ""
    return said if process.returncode == 0 else ""


def devices_without_torch(wish: str, count: int) -> tuple[DeviceKind, int]:
    """Return where trials that call the user's own function run, and on how many devices.

    Args:
        wish: ``auto``, ``cpu`` or ``cuda``.
        count: GPUs that are there.

    Raises:
        MachineError: CUDA is asked for and not there.
    """
    if wish == "cuda" and not count:
        raise MachineError(
            'looking for execution.device = "cuda"',
            "nvidia-smi finds no GPU",
            hint='set execution.device = "auto" to run without one',
        )
    return (DeviceKind.CPU, 1) if wish == "cpu" or not count else (DeviceKind.CUDA, count)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many trials may run side by side as far as cores go, and why."""

    most: int
    reason: str


def parallelism(config: StudyConfig, resolved: ResolveResult, cores: int) -> Parallelism:
    """How many trials may run side by side; memory may allow fewer.

    Args:
        config: The study.
        resolved: Where its trials run.
        cores: CPU cores it may use.
    """
    wish, execution = config.runtime.parallel, config.execution
    if wish != "auto":
        return Parallelism(wish, f"runtime.parallel is {wish}")
    on_cpu = resolved.device is DeviceKind.CPU
    together = execution.processes
    each = (execution.threads or min(cores, CPU_THREADS if on_cpu else CUDA_THREADS)) + execution.loader_workers
    most = max(1, 1 if on_cpu else resolved.device_count // together, cores // (each * together))
    whose = "each trial" if together == 1 else f"each of a trial's {together} processes"
    return Parallelism(min(most, _MOST_PARALLEL), f"{cores} core(s), {each} for {whose}")


def degrees_at_hand(config: StudyConfig, resolved: ResolveResult, cores: int) -> tuple[int, ...]:
    """Return the numbers of ranks that the planner may shard a trial's model over if ``execution.tp`` is "auto".

    There are no more than GPUs. On the CPU each rank of every trial that may run needs cores of its own.

    Args:
        config: The study.
        resolved: Where its trials run.
        cores: CPU cores it may use.
    """
    execution = config.execution
    if execution.tp != AUTO:
        return ()
    if resolved.device is DeviceKind.CUDA:
        return degrees_within(resolved.device_count)
    each = (execution.threads or 1) + execution.loader_workers
    return degrees_within(cores // (each * parallelism(config, resolved, cores).most))
