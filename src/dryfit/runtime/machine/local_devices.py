"""This machine's resources: the usable cores, and its GPUs by ``nvidia-smi``."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.jobs.train import ResolveResult
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.text.secrets import public_environment
from dryfit.runtime.machine.host_memory import host_total_bytes
from dryfit.runtime.machine.node import DeviceFacts, NodeFacts

_SMI_TIMEOUT_S = 20.0
_SMI_END_S = 2.0

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of ``/proc/cpuinfo`` on x86 and ARM with which oneDNN multiplies in bf16."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_here() -> str | None:
    """Return which CUDA devices the user lets us use, as ``CUDA_VISIBLE_DEVICES``; None: all."""
    return os.environ.get(_VISIBLE)


def local_facts(resolved: ResolveResult | None = None) -> NodeFacts:
    """Return this machine's resources for children.

    Args:
        resolved: What a child has found of its devices. None: none has looked, and the driver's own tool is asked;
            so it is where the child was on a machine without a GPU, and trials run on others.
    """
    variable = visible_here()
    if resolved is None or (resolved.device is DeviceKind.CUDA and not resolved.device_count):
        devices = driver_devices(variable)
    elif resolved.device is DeviceKind.CUDA:
        names = device_names(resolved.device_count, variable)
        count = len(names)
        uuids = resolved.device_uuids if len(resolved.device_uuids) == count else ("",) * count
        specs = resolved.device_specs if len(resolved.device_specs) == count else (resolved.device_spec,) * count
        devices = tuple(DeviceFacts(*each) for each in zip(names, uuids, specs, strict=True))
    else:
        devices = ()
    model, bf16 = processor()
    name = f"{platform.node()}, {platform.machine()} {model}".rstrip()
    return NodeFacts(available_cores(), host_total_bytes(), devices, name, bf16)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, bool]:
    """Return the processor's name, and whether it has instructions for bf16; where it is not known "", False."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", False
    model, flags = (
        re.search(rf"^{key}[ \t]*:(.*)$", text, re.MULTILINE) for key in ("model name", "(?:flags|Features)")
    )
    has = set(flags.group(1).split()) if flags is not None else set[str]()
    return model.group(1).strip() if model is not None else "", bool(_BF16_FLAGS & has)


def available_cores(cgroup_cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the CPU cores this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cgroup_cpu_max.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def device_names(count: int, variable: str | None) -> tuple[str, ...]:
    """Return the names of the CUDA devices a trial may be given, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Args:
        count: Devices that are there.
        variable: The variable as the user has set it: its devices, and no others, may be used.
    """
    if variable:
        return tuple(name.strip() for name in variable.split(","))[:count]
    return tuple(str(index) for index in range(count))


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


def first_gpu(variable: str | None) -> DeviceSpec | None:
    """Return the GPU that a trial would see first; None if there is none, or no driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    first = device_names(1, variable)[0]
    if variable is not None and not variable.strip():
        return None
    return next((spec for _, _, spec in _driver_lines("-i", first)), None)


def driver_devices(variable: str | None) -> tuple[DeviceFacts, ...]:
    """Return the GPUs that trials may use, as the driver's own tool knows them; none without a driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set. A MIG instance that it names is not described.
    """
    if variable is not None and not variable.strip():
        return ()
    known = {known: (uuid, spec) for index, uuid, spec in _driver_lines() for known in (index, uuid)}
    count = len(known) // 2 or gpu_count(variable)  # an older tool does not know all that was asked
    return tuple(DeviceFacts(name, *known.get(name, ("", None))) for name in device_names(count, variable))


def gpu_count(variable: str | None) -> int:
    """Return how many GPUs trials may use, as the driver's own tool counts them; 0 without a driver.

    Args:
        variable: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    if variable is not None and not variable.strip():
        return 0
    count = sum(line.strip().isdigit() for line in _query_driver("index").splitlines())
    return len(device_names(count, variable))


def _driver_lines(*options: str) -> Iterator[tuple[str, str, DeviceSpec | None]]:
    """Yield index, UUID and what is known of each GPU, as the driver's own tool says it.

    It is there wherever a driver is, and needs neither torch nor a CUDA context. It counts what the driver keeps for
    itself, which no program can have.
    """
    for line in _query_driver("index,uuid,name,memory.total,memory.reserved,compute_cap", *options).splitlines():
        index, *rest = (part.strip() for part in line.split(","))
        if not index.isdigit():
            continue
        try:
            uuid, name, total_mib, reserved_mib, capability = rest
            major, minor = map(int, capability.split("."))
            capacity_bytes = (int(total_mib) - int(reserved_mib)) * 2**20
            yield index, uuid, DeviceSpec(name=name, capacity_bytes=capacity_bytes, capability=(major, minor))
        except ValueError:  # a driver that does not know one of these, or "[N/A]"
            yield index, rest[0] if rest else "", None


def _query_driver(query: str, *options: str) -> str:
    """Return the output of the driver's own tool; empty if there is none, it fails, or the driver hangs.

    A process stuck in a driver outlives its kill, and ``subprocess.run`` would wait for its end: this does not.
    """
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *options]
    try:
        environment = public_environment(os.environ)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, errors="replace"
        )
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
