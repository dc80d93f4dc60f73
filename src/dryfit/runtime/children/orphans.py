"""Kills the processes of a study that outlived their control process."""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil

from dryfit.runtime.children.processes import carries_marker

_PASSES = 5
_WAIT_S = 10.0


def _marked(marker: str) -> Iterator[psutil.Process]:
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid not in spared and carries_marker(process.pid, marker):
            yield process


def sweep(marker: str) -> list[int]:
    """Kill every process of a study except this one and its ancestors; the caller holds the study's lock.

    Args:
        marker: Of the study in its folder, as its processes carry it in their environment.

    Returns:
        Process ids of those killed.
    """
    killed: set[int] = set()
    for _ in range(_PASSES):  # one that was being killed may just have made another
        marked = list(_marked(marker))
        if not marked:
            break
        for process in marked:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                killed.add(process.pid)
        psutil.wait_procs(marked, timeout=_WAIT_S)
    return sorted(killed)
