"""Run a command with all processes that it makes: time, CPU time, and the most memory of them together.

A process whose parent has died becomes a child of this one (Linux: a subreaper), so none escapes the count, and none
that a command leaves behind outlives the measurement.
"""

import ctypes
import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LEFT_S = 20.0  # what a process may take to end after the command has


@dataclass(frozen=True)
class TreeCost:
    """What a command and its processes have cost.

    Attributes:
        began_at_s: When it was started, in Unix seconds.
        wall_s: Until the command itself ended.
        cpu_s: User and system seconds of all processes.
        peak_rss_mib: The most resident memory at one time, summed over processes; shared pages count in each of them.
        peak_pss_mib: The same with a page that n processes share counted as an n-th in each.
        killed: Processes that were still there some seconds after the command's end.
    """

    began_at_s: float
    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    peak_pss_mib: float
    killed: int


def run_tree(command: Sequence[str], log: Path, env: Mapping[str, str], interval_s: float = 0.5) -> TreeCost:
    """Run a command to its end, and wait for what it leaves behind.

    Args:
        command: Program and arguments.
        log: File that its output is added to.
        env: Its whole environment.
        interval_s: Seconds between two looks at the processes' memory.

    Raises:
        RuntimeError: It failed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before_s = _waited_for_s()
    tree = _Tree()
    began_at_s, began_s = time.time(), time.perf_counter()
    code: int | None = None
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(env))
        while code is None:
            tree.look()
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(interval_s)
    wall_s = time.perf_counter() - began_s
    killed = _wait_for_the_rest()
    if code != 0:
        raise RuntimeError(f"{command[0]} ended with {code}, see {log}")
    # Children of a process that ignores their ends are in no one's account; what was seen of them is.
    cpu_s = max(_waited_for_s() - before_s, sum(tree.cpu_s.values()))
    return TreeCost(began_at_s, wall_s, cpu_s, tree.peak_rss_mib, tree.peak_pss_mib, killed)


class _Tree:
    """What was seen of the descendants of this process."""

    def __init__(self) -> None:
        self.cpu_s: dict[tuple[int, float], float] = {}
        """Seconds of each process as last seen, by its number and start."""
        self.peak_rss_mib = 0.0
        self.peak_pss_mib = 0.0

    def look(self) -> None:
        rss = pss = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                self.cpu_s[process.pid, process.create_time()] = times.user + times.system
                rss += process.memory_info().rss
                pss += _pss_bytes(process.pid)
        self.peak_rss_mib = max(self.peak_rss_mib, rss / 2**20)
        self.peak_pss_mib = max(self.peak_pss_mib, pss / 2**20)


def _pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process; 0 where it has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _waited_for_s() -> float:
    """Return the CPU seconds of all children that have been waited for, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _wait_for_the_rest() -> int:
    """Wait for all descendants, and kill those that stay; return how many were killed."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + _LEFT_S
    while left := psutil.Process().children(recursive=True):
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if time.monotonic() > deadline_s:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed.add(process.pid)
        time.sleep(0.02)
    return len(killed)
