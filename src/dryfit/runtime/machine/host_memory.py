"""What the host's memory has room for, and what our processes take of it."""

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from dryfit.runtime.machine.cgroup import memory_limit_bytes

_KEPT_FREE = 0.1
"""Share of the host's memory that is planned for nobody."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory at one moment.

    Attributes:
        total_bytes: All that this process may use.
        free_bytes: What is left of that.
        rss_bytes: What some processes have taken, by process id, each with all of its session: ranks, loader workers;
            pages that two sessions share are counted in both.
    """

    total_bytes: int
    free_bytes: int
    rss_bytes: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def plannable_bytes(self) -> int:
        """The most that a trial may be planned with where no other runs."""
        return self.total_bytes - int(_KEPT_FREE * self.total_bytes)

    def available_bytes(self, expected: Mapping[int, int]) -> int:
        """What can still be planned for.

        Args:
            expected: What processes are counted with: the part that they have not taken yet is theirs already.
        """
        to_come = sum(max(0, size_bytes - self.rss_bytes.get(pid, 0)) for pid, size_bytes in expected.items())
        return max(0, self.free_bytes - int(_KEPT_FREE * self.total_bytes) - to_come)


def read_host_memory(pids: Iterable[int]) -> HostMemory:
    """Look at the host's memory, and at some processes of ours; those that are gone take nothing.

    A child of ours leads a session. What its session's other processes have for themselves is counted as its own.

    Under a limit of the control group, what this process and its descendants take is subtracted from the limit.
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
    """The processes of some sessions, their leaders left out."""
    members: dict[int, list[int]] = {}
    for pid in psutil.pids() if leaders else ():
        with suppress(ProcessLookupError, PermissionError):
            session = os.getsid(pid)
            if session in leaders and pid not in leaders:
                members.setdefault(session, []).append(pid)
    return members


def _private_bytes(pid: int) -> int:
    """What would be free if a process ended: a fork shares most of what its parent had taken before."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError):
        return 0
