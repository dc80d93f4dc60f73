"""What the control group of this process allows it, and how many processes the kernel killed for want of memory."""

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60


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


def memory_limit_bytes(proc: Path = _PROC, root: Path = _ROOT) -> int | None:
    """The least memory limit of our cgroup (version 2, else 1); None where there is none.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (memory.max) and cgroup-v1/memory.rst
    (memory.limit_in_bytes; "no limit" is a number above any machine's memory).
    """
    try:
        membership = proc.read_text()
    except OSError:
        return None
    names = {"memory.events": "memory.max", "memory.oom_control": "memory.limit_in_bytes"}
    found: list[int] = []
    for counter in _counters(membership, root):
        try:
            text = counter.with_name(names[counter.name]).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            found.append(int(text))
    return min(found, default=None)


def rose(before: int | None, after: int | None) -> bool:
    """Whether the count rose; not where it is unknown."""
    return before is not None and after is not None and after > before
