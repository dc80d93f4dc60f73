"""Facts of this machine and their judgement: may trials run here?"""

import errno
import fcntl
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil
from packaging.requirements import Requirement

from dryfit.ledger.folder import shared_traces
from dryfit.processes.node import Nodes, available_cores, memory_limit_bytes
from dryfit.processes.wall import WALLS
from dryfit.processes.wall_keeper import wall_here
from dryfit.settings.check_messages import ProbeRequest, ProbeResult
from dryfit.settings.choices import Wall
from dryfit.settings.errors import ChildError, DryfitError, MachineError
from dryfit.settings.files import sync_path
from dryfit.settings.installed import requirements
from dryfit.settings.text import gib
from dryfit.settings.wire import ErrorParts
from dryfit.study.child_jobs import STANDALONE_LIMITS, ChildJob, run_alone, run_job

# The result of a check: passed, a warning, or a failure, with its fix.


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    """Trials run, but not as one may expect."""
    FAIL = "fail"
    """Trials would not run, or not all of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        about: Its subject: ``machine``, ``study``, ``data``, or ``model NAME``.
        check: What was checked.
        found: What was found, with values.
        fix: What to do; empty only where it passed.
    """

    about: str
    check: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status is not Status.PASS and not self.fix:
            raise ValueError(f"{self.about}, {self.check}: a finding to act on must say how")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in order."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return not any(finding.status is Status.FAIL for finding in self.findings)

    @property
    def counts(self) -> dict[Status, int]:
        """The number of checks by status."""
        counts = Counter(finding.status for finding in self.findings)
        return {status: counts[status] for status in Status}


def passed(about: str, check: str, found: str) -> Finding:
    """Return a finding that passed."""
    return Finding(about, check, Status.PASS, found)


def warned(about: str, check: str, found: str, fix: str) -> Finding:
    """Return a warning."""
    return Finding(about, check, Status.WARN, found, fix)


def failed(about: str, check: str, found: str, fix: str) -> Finding:
    """Return a failure."""
    return Finding(about, check, Status.FAIL, found, fix)


def failed_by(about: str, check: str, error: DryfitError | ErrorParts) -> Finding:
    """Return a failed check with an error's message."""
    allowed = f"allowed: {error.allowed}" if error.allowed else ""
    advice = "; ".join(part for part in (error.hint, allowed) if part)
    return failed(about, check, f"{error.doing}: {error.found}", advice or "put that right, and look again")


# What a folder's file system can do, tried with temporary files.


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Facts about a folder, or about the nearest existing one above it.

    Attributes:
        folder: The folder that was tried.
        file_system: Its kind: ``ext4``, ``nfs4``; empty where unknown.
        free_bytes: What this user may still write.
        not_writable: Why no file could be written; empty if one could.
        not_locked: Why locks do not work; empty if a second lock was refused.
        not_durable: Why a rename or an fsync failed; empty if both worked.
    """

    folder: Path
    file_system: str
    free_bytes: int
    not_writable: str = ""
    not_locked: str = ""
    not_durable: str = ""


def nearest_folder(path: Path) -> Path:
    """Return the folder itself if it exists, else the nearest one above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def look_at_folder(path: Path) -> FolderFacts:
    """Try a folder's writes, locks and durable renames."""
    folder = nearest_folder(path)
    free_bytes, kind = shutil.disk_usage(folder).free, _file_system(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".dryfit-doctor-", dir=folder) as own:
            return FolderFacts(
                folder, kind, free_bytes, not_locked=_not_locked(Path(own)), not_durable=_not_durable(Path(own))
            )
    except OSError as error:
        return FolderFacts(folder, kind, free_bytes, not_writable=_os_error(error))


def _os_error(error: OSError) -> str:
    return error.strerror or errno.errorcode.get(error.errno or 0, type(error).__name__)


def _not_locked(folder: Path) -> str:
    """Return why :class:`dryfit.ledger.ledger.StudyLock` would not keep a second process out here; empty if it does."""
    path = folder / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "two holders got the same lock"
    except OSError as error:
        return _os_error(error)
    finally:
        os.close(first)
        os.close(second)


def _not_durable(folder: Path) -> str:
    """Return why a file cannot be replaced in one step that survives a power cut; empty if it can."""
    old, new = folder / "old", folder / "new"
    try:
        old.write_text("old", encoding="utf-8")
        with new.open("w", encoding="utf-8") as file:
            file.write("new")
            file.flush()
            os.fsync(file.fileno())
        new.replace(old)
        sync_path(folder)
        found = old.read_text(encoding="utf-8")
    except OSError as error:
        return _os_error(error)
    return "" if found == "new" else f"after a rename the file holds {found!r}"


def _file_system(folder: Path) -> str:
    """Return the kind of the file system that a folder is on: that of the longest mount point above it."""
    found, kind = "", ""
    with suppress(OSError, psutil.Error):
        real = str(folder.resolve())
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint.rstrip("/") + "/"
            if f"{real}/".startswith(point) and len(point) >= len(found):
                found, kind = point, mount.fstype
    return kind


# Facts of this machine, gathered without judging them: libraries, memory, folders, GPUs, starts of children.


_SHARED_MEMORY = Path("/dev/shm")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ON = ("1", "ON", "YES", "TRUE")
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
        offline=tuple(name for name in _OFFLINE_VARIABLES if environment.get(name, "").upper() in _ON),
        driver=driver(),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
    )


def packages() -> tuple[Package, ...]:
    """Return the libraries in dryfit's own metadata, those of its extras included; none if it is not installed."""
    found: dict[str, Package] = {}
    for name, line, extra in requirements():
        if extra == _DEVELOPMENT:
            continue
        before = found.get(name)
        extras = (*(before.extras if before else ()), *((extra,) if extra else ()))
        found[name] = _package(Requirement(line), extras)
    return tuple(found.values())


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
        gpus = tuple(_gpu_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        return Driver(str(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", gpus)
    except nvml.NVMLError as error:
        return Driver(trouble=str(error))
    finally:
        nvml.nvmlShutdown()


def _gpu_of(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def fork_round_trip(nodes: Nodes, folder: Path) -> RoundTrip:
    """Get torch's devices from two forked children: the first waits for the server, the second for a fork alone.

    Args:
        nodes: The first of them only forks.
        folder: The folder of the children's folders.
    """
    if find_spec("torch") is None:
        return RoundTrip("fork server", 0.0, trouble=NO_TORCH)
    times_s: list[float] = []
    probe: ProbeResult | None = None
    job = ChildJob("asking a forked child", ProbeRequest(), folder / "probe", STANDALONE_LIMITS)
    try:
        for _ in range(2):
            began_s = time.monotonic()
            probe = run_job(job, nodes)
            times_s.append(time.monotonic() - began_s)
    except (ChildError, OSError) as error:
        return RoundTrip("fork server", sum(times_s), trouble=_trouble(error))
    return RoundTrip("fork server", times_s[0], times_s[1], probe=probe)


def fresh_round_trip() -> RoundTrip:
    """Get torch's devices from a fresh interpreter."""
    if find_spec("torch") is None:
        return RoundTrip("fresh interpreter", 0.0, trouble=NO_TORCH)
    began_s = time.monotonic()
    try:
        probe = run_alone("asking a fresh interpreter", ProbeRequest())
    except (ChildError, MachineError, OSError) as error:
        return RoundTrip("fresh interpreter", time.monotonic() - began_s, trouble=_trouble(error))
    return RoundTrip("fresh interpreter", time.monotonic() - began_s, probe=probe)


def _trouble(error: ChildError | MachineError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"{error.found} ({error.hint})" if error.hint else error.found


def forks_here() -> bool:
    """Return whether children can be forked from a server on this system."""
    return sys.platform == "linux"


# Judges the facts of a machine: may trials run here? Pure.


ABOUT: Final = "machine"
NO_TORCH = "torch is not installed: scripts and functions can be searched, dryfit's own tasks and Trainers cannot"
_OF_DRYFIT = frozenset({"search", "tasks"})
"""Extras whose packages dryfit's own code imports as they are: another version of one is a fault."""

_LEAST_OPEN_FILES: Final = 256
_EASY_OPEN_FILES: Final = 1024
_EASY_MEMORY_BYTES: Final = 2 << 30
_EASY_SHARED_BYTES: Final = 256 << 20
_EASY_CACHE_BYTES: Final = 1 << 30
_FAR_AWAY: Final = ("nfs", "cifs", "smb", "9p", "sshfs", "lustre", "gpfs", "glusterfs", "beegfs", "ceph")


def machine_findings(facts: MachineFacts, trips: tuple[RoundTrip, ...]) -> Iterator[Finding]:
    """Judge a machine.

    Args:
        facts: The facts of the machine.
        trips: The trial starts of children on it.
    """
    yield passed(ABOUT, "Python", f"{facts.python} on {facts.system}")
    yield from _packages(facts.packages)
    yield _cores(facts)
    yield _memory(facts)
    yield _open_files(facts.open_files)
    if facts.shared_memory is not None:
        yield _shared_memory(facts.shared_memory)
    yield _cache("plans' cache", facts.cache)
    yield _cache("hub cache", facts.hub_cache)
    offline = f"{', '.join(facts.offline)}: only models that are here" if facts.offline else "not asked for"
    yield passed(ABOUT, "offline", offline)
    yield _wall(facts.wall)
    yield from (_round_trip(trip, facts.open_files) for trip in trips)
    yield _gpu(facts, next((trip.probe for trip in trips if trip.probe is not None), None))


def _packages(packages: tuple[Package, ...]) -> Iterator[Finding]:
    needed = [package for package in packages if not package.extras]
    if not needed:
        found = "dryfit is not installed as a package: nobody says which libraries it needs"
        yield warned(ABOUT, "libraries", found, "pip install dryfit (or -e . in its folder)")
        return
    wrong = [package for package in needed if not package.allowed]
    if wrong:
        fix = "pip install " + " ".join(f"'{package.name}{package.wanted}'" for package in wrong)
        yield failed(ABOUT, "libraries", "; ".join(_version(package) for package in wrong), fix)
    else:
        yield passed(ABOUT, "libraries", ", ".join(f"{package.name} {package.found}" for package in needed))
    for extras in dict.fromkeys(package.extras for package in packages if package.extras):
        yield _extra(extras, [package for package in packages if package.extras == extras])


def _extra(extras: tuple[str, ...], packages: list[Package]) -> Finding:
    check = f"extra {', '.join(extras)}"
    wrong = [package for package in packages if package.found is not None and not package.allowed]
    if wrong:
        fix = "pip install " + " ".join(f"'{package.name}{package.wanted}'" for package in wrong)
        say = failed if _OF_DRYFIT & set(extras) else warned
        return say(ABOUT, check, "; ".join(_version(package) for package in wrong), fix)
    there = [f"{package.name} {package.found}" for package in packages if package.found is not None]
    absent = [package.name for package in packages if package.found is None]
    if absent:
        verb, them = ("is", "it") if len(absent) == 1 else ("are", "them")
        there.append(f"{', '.join(absent)} {verb} not installed (only what names {them} needs {them})")
    return passed(ABOUT, check, "; ".join(there))


def _version(package: Package) -> str:
    return f"{package.name} is {package.found or 'not installed'}, wanted: {package.wanted or 'any'}"


def _cores(facts: MachineFacts) -> Finding:
    held = f" (of {facts.cores_here}: the affinity or the control group allows no more)"
    return passed(ABOUT, "cores", f"{facts.cores}{held if facts.cores < facts.cores_here else ''}")


def _memory(facts: MachineFacts) -> Finding:
    limit = facts.memory_limit_bytes
    allowed = min(facts.memory_free_bytes, limit) if limit is not None else facts.memory_free_bytes
    found = f"{gib(facts.memory_bytes)}, {gib(facts.memory_free_bytes)} of it free"
    found += f"; the control group allows {gib(limit)}" if limit is not None else "; no limit of a control group"
    if allowed < _EASY_MEMORY_BYTES:
        fix = f"free some: a child with torch takes 0.5 GiB before its model, {gib(_EASY_MEMORY_BYTES)} are sensible"
        return warned(ABOUT, "memory", found, fix)
    return passed(ABOUT, "memory", found)


def _open_files(limit: int) -> Finding:
    found = "no limit" if limit < 0 or limit > 1 << 30 else str(limit)
    fix = f"ulimit -n {4 * _EASY_OPEN_FILES}"
    if 0 <= limit < _LEAST_OPEN_FILES:
        return failed(ABOUT, "open files", found, fix)
    return passed(ABOUT, "open files", found) if limit < 0 or limit >= _EASY_OPEN_FILES else _low(found, fix)


def _low(found: str, fix: str) -> Finding:
    return warned(ABOUT, "open files", f"{found}: many trials side by side may run out of them", fix)


def _shared_memory(facts: FolderFacts) -> Finding:
    found = f"{gib(facts.free_bytes)} free"
    if facts.not_writable:
        return failed(ABOUT, "/dev/shm", facts.not_writable, "mount a writable tmpfs there (docker: --shm-size 1g)")
    if facts.free_bytes < _EASY_SHARED_BYTES:
        return warned(ABOUT, "/dev/shm", found, "keep execution.loader_workers = 0, or enlarge it (docker: --shm-size)")
    return passed(ABOUT, "/dev/shm", found)


def _cache(check: str, facts: FolderFacts) -> Finding:
    found = f"{facts.folder}, {gib(facts.free_bytes)} free"
    variable = "HF_HOME" if check == "hub cache" else "DRYFIT_CACHE"
    if facts.not_writable:
        return warned(
            ABOUT, check, f"{facts.folder}: {facts.not_writable}", f"set {variable} to a folder you may write"
        )
    if facts.free_bytes < _EASY_CACHE_BYTES:
        return warned(ABOUT, check, found, f"free some space, or set {variable} to a folder on another disk")
    return passed(ABOUT, check, found)


def _wall(wall: Wall) -> Finding:
    """Judge what keeps a rehearsed script from real files."""
    if wall is Wall.REDIRECT:
        fix = "a kernel with Landlock (Linux 5.13), or one that lets users make namespaces"
        return warned(ABOUT, "files in rehearsals", WALLS[wall], fix)
    return passed(ABOUT, "files in rehearsals", WALLS[wall])


def folder_findings(about: str, facts: FolderFacts) -> Iterator[Finding]:
    """Judge the folder of a study, which need not exist: writing, locks, renames."""
    if facts.not_writable:
        found = f"{facts.folder}: {facts.not_writable}"
        yield failed(about, "folder", found, "choose another with --dir, or make it writable")
        return
    yield passed(about, "folder", f"{facts.folder} can be written" + _on(facts))
    distant = any(facts.file_system.lower().removeprefix("fuse.").startswith(name) for name in _FAR_AWAY)
    local = "keep the study on a local disk, and copy it when it is done"
    if facts.not_locked:
        yield failed(about, "locks", f"{facts.folder}: {facts.not_locked}{_on(facts)}", local)
    elif distant:
        found = f"they work here, but this is a network file system{_on(facts)}: other machines may not see them"
        yield warned(about, "locks", found, local)
    else:
        yield passed(about, "locks", "a second taker is refused")
    if facts.not_durable:
        yield failed(about, "renames", f"{facts.folder}: {facts.not_durable}", local)
    else:
        yield passed(about, "renames", "in one step, and synced")


def _on(facts: FolderFacts) -> str:
    return f" ({facts.file_system})" if facts.file_system else ""


def _round_trip(trip: RoundTrip, open_files: int) -> Finding:
    if trip.trouble is NO_TORCH:
        return warned(ABOUT, trip.how, trip.trouble, "pip install 'dryfit[tasks]'")
    if trip.trouble and trip.how == "fork server":
        fix = 'set runtime.isolation = "fresh", which is slower to start'
        return warned(ABOUT, trip.how, trip.trouble, fix)
    if trip.trouble:
        fix = f"read that log; enough memory, processes (ulimit -u) and open files ({open_files}) are what it takes"
        return failed(ABOUT, trip.how, trip.trouble, fix)
    again = f", a second one after {trip.next_s * 1000:.0f} ms" if trip.next_s is not None else ""
    return passed(ABOUT, trip.how, f"a child answered after {trip.first_s:.1f} s{again}")


def _gpu(facts: MachineFacts, probe: ProbeResult | None) -> Finding:
    seen = facts.driver
    names = ", ".join(f"{gpu.name} ({gib(gpu.total_bytes)}, {gib(gpu.used_bytes)} in use)" for gpu in seen.gpus)
    said = f"driver {seen.version} (CUDA {seen.cuda}): {names or 'no GPU'}" if seen.version else seen.trouble
    if probe is None:
        return warned(ABOUT, "GPU", f"{said}; no child could be asked what torch can use", "see the checks above")
    if probe.devices and not probe.trouble:
        usable = ", ".join(f"{gpu.name} ({gib(gpu.capacity_bytes)})" for gpu in probe.devices)
        return passed(ABOUT, "GPU", f"torch {probe.torch} can use {usable}; {said}")
    if probe.trouble:
        return failed(ABOUT, "GPU", f"torch {probe.torch}: {probe.trouble}; {said}", _newer(probe, seen))
    if not seen.gpus:
        return passed(ABOUT, "GPU", f"none ({said}): trials run on the CPU")
    if facts.visible_devices is not None and not facts.visible_devices.strip(" ,-1"):
        return passed(ABOUT, "GPU", f"hidden by CUDA_VISIBLE_DEVICES={facts.visible_devices!r}; {said}")
    if probe.cuda_build is None:
        fix = "install a CUDA build of torch (pytorch.org, get started)"
        return warned(ABOUT, "GPU", f"torch {probe.torch} is a CPU build; {said}", fix)
    return failed(ABOUT, "GPU", f"torch {probe.torch} finds none; {said}", _newer(probe, seen))


def _newer(probe: ProbeResult, seen: Driver) -> str:
    there = f"this one: {seen.cuda}" if seen.cuda else "this one is unknown"
    return f"a driver for CUDA {probe.cuda_build} or newer ({there}), or a torch for an older one"
