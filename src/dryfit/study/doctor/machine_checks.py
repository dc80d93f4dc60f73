"""Judges the facts of a machine: may trials run here? Pure."""

from collections.abc import Iterator
from typing import Final

from dryfit.core.jobs.diagnostics import ProbeResult
from dryfit.core.text.units import gib
from dryfit.core.wall.places import WALLS, Wall
from dryfit.study.doctor.finding import Finding, failed, passed, warned
from dryfit.study.doctor.folder import FolderFacts
from dryfit.study.doctor.machine_facts import Driver, MachineFacts, Package, RoundTrip

ABOUT: Final = "machine"

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
    for package in packages:
        if not package.extras:
            continue
        check = f"extra {', '.join(package.extras)}"
        if package.found is None:
            yield passed(ABOUT, check, f"{package.name} is not installed (only what names it needs it)")
        elif package.allowed:
            yield passed(ABOUT, check, f"{package.name} {package.found}")
        else:
            yield warned(ABOUT, check, _version(package), f"pip install '{package.name}{package.wanted}'")


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
