"""The host's free memory, by its control group too, and the memory that our processes take of it."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_PROC = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60


def _values(names: dict[int, str], proc: Path, root: Path) -> Iterator[str]:
    """Yield the contents of our cgroup's files, the most specific first (a container may see only its root).

    Args:
        names: Name of the file by version of cgroups.
    """
    try:
        membership = proc.read_text()
    except OSError:
        return
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            files = [root / relative / names[2], root / names[2]]
        elif "memory" in controllers.split(","):
            files = [root / "memory" / relative / names[1], root / "memory" / names[1]]
        else:
            continue
        for file in files:
            with suppress(OSError):
                yield file.read_text()


def oom_kills(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Return the out-of-memory kills counted by our cgroup (version 2, else 1); None if they are not counted.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst
    (memory.oom_control); both have a line ``oom_kill N``.
    """
    for text in _values({2: "memory.events", 1: "memory.oom_control"}, proc, root):
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def memory_limit_bytes(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Return the lowest memory limit of our cgroup (version 2, else 1); None if there is none.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (memory.max) and cgroup-v1/memory.rst
    (memory.limit_in_bytes; "no limit" is a number above any machine's memory).
    """
    texts = [text.strip() for text in _values({2: "memory.max", 1: "memory.limit_in_bytes"}, proc, root)]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def rose(before: int | None, after: int | None) -> bool:
    """Whether a count rose; False if it is unknown."""
    return before is not None and after is not None and after > before


_KEPT_FREE = 0.1
"""Share of the host's memory that is kept free."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory at one moment.

    Attributes:
        total_bytes: All memory that this process may use.
        free_bytes: The part of it that is free.
        rss_bytes: Memory taken by processes of ours, by process id, each with its whole session (ranks, loader
            workers); pages shared by two sessions count in both.
    """

    total_bytes: int
    free_bytes: int
    rss_bytes: Mapping[int, int] = field(default_factory=dict[int, int])

    def available_bytes(self, expected: Mapping[int, int]) -> int:
        """Return the memory that further trials can be planned with.

        Args:
            expected: Planned memory by process id; the part not taken yet is reserved.
        """
        to_come = sum(max(0, size_bytes - self.rss_bytes.get(pid, 0)) for pid, size_bytes in expected.items())
        return max(0, self.free_bytes - int(_KEPT_FREE * self.total_bytes) - to_come)


def plannable_bytes(total_bytes: int) -> int:
    """Return the most that a trial may be planned with, on a host with so much memory, if no other runs."""
    return total_bytes - int(_KEPT_FREE * total_bytes)


def host_total_bytes() -> int:
    """Return the memory of this machine, or the limit of our cgroup where that is lower."""
    total_bytes = psutil.virtual_memory().total
    return min(total_bytes, memory_limit_bytes() or total_bytes)


def read_host_memory(pids: Iterable[int]) -> HostMemory:
    """Read the host's memory, and that of some children of ours; ended ones take nothing.

    A child leads a session, and the private memory of the session's other processes is counted as the child's.

    Under a memory limit of the cgroup, free memory is the limit less what this process and its descendants take.
    """
    rss_bytes: dict[int, int] = {}
    for pid in pids:
        with suppress(psutil.Error):
            rss_bytes[pid] = psutil.Process(pid).memory_info().rss
    for leader, members in _sessions(rss_bytes).items():
        rss_bytes[leader] += sum(map(_private_bytes, members))
    memory = psutil.virtual_memory()
    limit_bytes = memory_limit_bytes()
    if limit_bytes is None or limit_bytes >= memory.total:
        return HostMemory(memory.total, memory.available, rss_bytes)
    taken_bytes = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            taken_bytes += process.memory_info().rss
    return HostMemory(limit_bytes, max(0, min(memory.available, limit_bytes - taken_bytes)), rss_bytes)


def _sessions(leaders: Collection[int]) -> dict[int, list[int]]:
    """Return the processes of some sessions without their leaders."""
    members: dict[int, list[int]] = {}
    for pid in psutil.pids() if leaders else ():
        with suppress(ProcessLookupError, PermissionError):
            session = os.getsid(pid)
            if session in leaders and pid not in leaders:
                members.setdefault(session, []).append(pid)
    return members


def _private_bytes(pid: int) -> int:
    """Return the memory that would be free if a process ended: a fork shares most of its memory with its parent."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError):
        return 0
