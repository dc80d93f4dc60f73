"""The memory limit of this process's cgroup, and its count of out-of-memory kills."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
