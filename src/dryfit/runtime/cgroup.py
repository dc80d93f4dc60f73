"""How many processes the kernel killed here for want of memory."""

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def _counters(membership: str, root: Path) -> Iterator[Path]:
    """Files that may hold the count, the most specific first (a container may see only the root of its tree)."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            yield root / relative / "memory.events"
            yield root / "memory.events"
        elif "memory" in controllers.split(","):
            yield root / "memory" / relative / "memory.oom_control"
            yield root / "memory" / "memory.oom_control"


def oom_kills(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """Out-of-memory kills counted by our cgroup (version 2, else 1); None where nobody counts.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst
    (memory.oom_control); both have a line ``oom_kill N``.
    """
    try:
        membership = proc.read_text()
    except OSError:
        return None
    for counter in _counters(membership, root):
        try:
            text = counter.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def rose(before: int | None, after: int | None) -> bool:
    """Whether the count rose; not where it is unknown."""
    return before is not None and after is not None and after > before
