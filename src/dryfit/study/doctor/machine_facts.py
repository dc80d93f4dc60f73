"""Facts of this machine, gathered without judging them: libraries, memory, folders, GPUs, starts of children."""

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from dryfit.core.errors import ChildError, MachineError
from dryfit.core.jobs.diagnostics import ProbeRequest, ProbeResult
from dryfit.core.wall.keeper import wall_here
from dryfit.core.wall.places import Wall
from dryfit.runtime.machine.host_memory import memory_limit_bytes
from dryfit.runtime.machine.local_devices import available_cores
from dryfit.runtime.machine.node import Nodes
from dryfit.store.layout import shared_traces
from dryfit.study.doctor.folder import FolderFacts, look_at_folder
from dryfit.study.loop.child_jobs import ChildJob, run_alone, run_job
from dryfit.study.trials.child_limits import STANDALONE_LIMITS

_SHARED_MEMORY = Path("/dev/shm")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_OURS = "dryfit"
_DEVELOPMENT = "dev"


@dataclass(frozen=True, slots=True)
class Package:
    """A library that dryfit needs or can use.

    Attributes:
        wanted: The versions that are allowed, as pip writes them; empty: any.
        found: The installed version; None if there is none.
        allowed: Whether that version is allowed.
        extras: The extras that bring it; empty: it is always needed.
    """

    name: str
    wanted: str
    found: str | None
    allowed: bool
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver sees it."""

    name: str
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Driver:
    """The GPUs' driver, as NVML describes it.

    Attributes:
        version: Its version; empty if it could not be asked.
        cuda: The newest CUDA version that it supports.
        trouble: Why it could not be asked.
    """

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A trial start of a child, up to its answer.

    Attributes:
        first_s: Seconds to the first answer, imports included.
        next_s: Seconds to a second one; None if there was none.
        trouble: Why there was no answer; empty if there was one.
        probe: The answer.
    """

    how: str
    first_s: float
    next_s: float | None = None
    trouble: str = ""
    probe: ProbeResult | None = None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts of a machine."""

    python: str
    system: str
    packages: tuple[Package, ...]
    cores: int
    cores_here: int
    memory_bytes: int
    memory_free_bytes: int
    memory_limit_bytes: int | None
    open_files: int
    shared_memory: FolderFacts | None
    cache: FolderFacts
    hub_cache: FolderFacts
    wall: Wall
    offline: tuple[str, ...]
    driver: Driver
    visible_devices: str | None


def machine_facts(environment: Mapping[str, str], home: Path) -> MachineFacts:
    """Gather the facts of this machine; no child is started, and torch is not imported.

    Args:
        environment: Variables that decide where caches are, what is offline and which GPUs may be used.
        home: The user's home folder.
    """
    memory = psutil.virtual_memory()
    return MachineFacts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        packages=packages(),
        cores=available_cores(),
        cores_here=os.cpu_count() or 1,
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        memory_limit_bytes=memory_limit_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory=look_at_folder(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None,
        cache=look_at_folder(shared_traces(environment, home)),
        hub_cache=look_at_folder(hub_cache(environment, home)),
        wall=wall_here(),
        offline=tuple(name for name in _OFFLINE_VARIABLES if _is_on(environment.get(name, ""))),
        driver=driver(),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
    )


def packages() -> tuple[Package, ...]:
    """Return the libraries in dryfit's own metadata, those of its extras included; none if it is not installed."""
    try:
        lines = requires(_OURS) or []
    except PackageNotFoundError:
        return ()
    found: dict[str, Package] = {}
    for line in lines:
        requirement = Requirement(line)
        extra = _extra_of(requirement)
        if extra == _DEVELOPMENT:
            continue
        before = found.get(requirement.name)
        extras = (*(before.extras if before else ()), *((extra,) if extra else ()))
        found[requirement.name] = _package(requirement, extras)
    return tuple(found.values())


def _extra_of(requirement: Requirement) -> str:
    """Return the extra that a requirement belongs to; empty: none."""
    _, _, rest = str(requirement.marker or "").partition("extra ==")
    return rest.strip().strip("\"'")


def _package(requirement: Requirement, extras: tuple[str, ...]) -> Package:
    try:
        there = version(requirement.name)
    except PackageNotFoundError:
        there = None
    allowed = there is not None and requirement.specifier.contains(there, prereleases=True)
    return Package(requirement.name, str(requirement.specifier), there, allowed, extras)


def hub_cache(environment: Mapping[str, str], home: Path) -> Path:
    """Return the cache of hub models, by huggingface_hub's own rule (``huggingface_hub/constants.py``)."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    base = Path(environment["XDG_CACHE_HOME"]) if environment.get("XDG_CACHE_HOME") else home / ".cache"
    return base / "huggingface" / "hub"


def _is_on(value: str) -> bool:
    return value.upper() in ("1", "ON", "YES", "TRUE")


def driver() -> Driver:
    """Ask NVML, the driver's own library; it needs no CUDA context."""
    try:
        nvml: Any = import_module("pynvml")
    except ModuleNotFoundError:
        return Driver(trouble="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Driver(trouble=str(error))
    try:
        cuda: int = nvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        return Driver(str(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", gpus)
    except nvml.NVMLError as error:
        return Driver(trouble=str(error))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def fork_round_trip(nodes: Nodes, folder: Path) -> RoundTrip:
    """Get torch's devices from two forked children: the first waits for the server, the second for a fork alone.

    Args:
        nodes: The first of them only forks.
        folder: The folder of the children's folders.
    """
    times_s: list[float] = []
    probe: ProbeResult | None = None
    job = ChildJob("asking a forked child", ProbeRequest(), folder / "probe", STANDALONE_LIMITS)
    try:
        for _ in range(2):
            began_s = time.monotonic()
            probe = run_job(job, nodes)
            times_s.append(time.monotonic() - began_s)
    except (ChildError, OSError) as error:
        return RoundTrip("fork server", sum(times_s), trouble=_said(error))
    return RoundTrip("fork server", times_s[0], times_s[1], probe=probe)


def fresh_round_trip() -> RoundTrip:
    """Get torch's devices from a fresh interpreter."""
    began_s = time.monotonic()
    try:
        probe = run_alone("asking a fresh interpreter", ProbeRequest())
    except (ChildError, MachineError, OSError) as error:
        return RoundTrip("fresh interpreter", time.monotonic() - began_s, trouble=_said(error))
    return RoundTrip("fresh interpreter", time.monotonic() - began_s, probe=probe)


def _said(error: ChildError | MachineError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"{error.found} ({error.hint})" if error.hint else error.found


def forks_here() -> bool:
    """Return whether children can be forked from a server on this system."""
    return sys.platform == "linux"
