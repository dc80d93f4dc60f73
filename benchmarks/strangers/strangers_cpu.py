"""How many CPU seconds a command took, with all that it started."""

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


class Spent:
    """CPU seconds, user and system, of everything that this process starts from now on, while it runs and after.

    Processes whose parent ends become children of this one (Linux), so that none is lost. One thing at a time.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        self._before, self._most = _ended(), 0.0

    def seconds(self) -> float:
        """Return the seconds until now."""
        stats = dict(filter(None, map(_read, Path("/proc").glob("[0-9]*/stat"))))
        below = _below(os.getpid(), {process: parent for process, (parent, _) in stats.items()})
        now = _ended() - self._before + sum(stats[process][1] for process in below)
        self._most = max(self._most, now)  # those of a process that nobody waited for are lost with the process
        return self._most


def _ended() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(path: Path) -> tuple[int, tuple[int, float]] | None:
    """Return a process with its parent and its seconds, those of its ended children too; None where it is gone."""
    try:
        fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(path.parent.name), (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS)


def _below(root: int, parents: Mapping[int, int]) -> set[int]:
    """Return the processes that descend from one."""
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}
