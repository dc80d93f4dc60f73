"""Kills and reaps processes together with all they started, and sweeps those that a killed session left."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from dryfit.core.helper import kill_group, kill_leftovers
from dryfit.core.wire import MARKER_VARIABLE

_GONE_POLL_S = 0.01


def reap_any() -> tuple[int, int] | None:
    """Reap one ended child; the rest of its session is killed first. Linux only.

    Returns:
        Its process id and wait status, or None where no child has ended.
    """
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    kill_leftovers(ended.si_pid)
    return os.waitpid(ended.si_pid, 0)


def marker_of(study: str, folder: Path) -> str:
    """Return the marker in the environment of a study's processes.

    Of a folder its file system's number for it, which a new name does not change: a copy of a study has the study's id,
    and both may run at once.
    """
    at = folder.stat()
    return f"{study}-{at.st_dev:x}-{at.st_ino:x}"


def carries_marker(pid: int, marker: str) -> bool:
    """Return whether a process belongs to a study."""
    try:
        return psutil.Process(pid).environ().get(MARKER_VARIABLE) == marker
    except (psutil.Error, OSError):
        return False


def lives(pid: int) -> bool:
    """Return whether there is such a process, and it is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def session_members(leader_pid: int, marker: str) -> list[int]:
    """Return the processes of a child's session that carry the study's marker, the child itself included."""
    members: list[int] = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if pid != os.getpid() and os.getsid(pid) == leader_pid and carries_marker(pid, marker):
                members.append(pid)
    return members


def kill_session(leader_pid: int, marker: str) -> None:
    """Kill a child that leads a session, and every process of that session, whatever its group.

    Args:
        leader_pid: The child.
        marker: The study's, which all of them carry in their environment, so that a process that was given one
            of their ids meanwhile is never killed.
    """
    if carries_marker(leader_pid, marker):
        kill_group(leader_pid)
    for pid in session_members(leader_pid, marker):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Wait until a process that is not our child has ended; a zombie counts as ended."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if not lives(pid):
            return True
        time.sleep(_GONE_POLL_S)
    return False


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
