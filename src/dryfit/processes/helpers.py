"""Helper processes beside this one: started, asked within limits, killed with all that they started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import psutil

from dryfit.settings.files import appending
from dryfit.settings.wire import MARKER_VARIABLE

_READ_BYTES = 65_536
_KILL_GRACE_S = 2.0


def python_command(module: str, *arguments: str) -> list[str]:
    """Command that runs a module in a new interpreter; -P: no file of the current folder can shadow a library."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_helper(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    keep: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own: no signal of a terminal reaches it.

    Args:
        command: What it runs.
        environment: Its whole environment.
        log: Where its output is appended; None: nobody reads it.
        stdin: Its standard input.
        keep: Descriptors that it inherits besides.

    Raises:
        OSError: The system cannot make another process, or the log cannot be written.
    """
    with ExitStack() as stack:
        output = subprocess.DEVNULL if log is None else stack.enter_context(appending(log))
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=keep,
            start_new_session=True,
        )


def end_helper(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """Wait for the end of a process; after ``grace_s`` kill it and its session."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
        return
    kill_group(process.pid)
    with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies as soon as its call is over
        process.wait(_KILL_GRACE_S)


def kill_group(pid: int) -> None:
    """Kill the process group a child leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_leftovers(leader_pid: int) -> None:
    """Kill what is left of the session of a child that has ended and is not reaped yet.

    Until it is reaped, no other process can have its process id.
    """
    kill_group(leader_pid)
    for pid in _pids():
        with suppress(ProcessLookupError, PermissionError):
            if pid != leader_pid and os.getsid(pid) == leader_pid:
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    """Return the ids of all processes: core has the standard library alone."""
    if sys.platform == "linux":
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    said = subprocess.run(["ps", "-A", "-o", "pid="], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in said.split()]


class Answering:
    """A process that answers each line of its standard input (a socket) with a line; starts on demand.

    Args:
        command: What it runs.
        environment: Its whole environment.
        log: Where its output is appended; None: nobody reads it.
        answer_s: Longest wait for an answer, and for what the process does before its first one.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path | None = None, answer_s: float
    ) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._answer_s = answer_s
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, or of the last one; None: it was never asked."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, where there is none, before its first question.

        Raises:
            OSError: The system cannot make another process.
        """
        if self._line is not None:
            return
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = start_helper(
                    self._command, environment=self._environment, log=self._log, stdin=theirs.fileno()
                )
        except OSError:
            self.end()
            raise

    def ask(self, question: str) -> bytes:
        """Return the line that answers a line.

        Raises:
            TimeoutError: None came in time.
            OSError: The process cannot be started, or has died.
        """
        self.start()
        assert self._line is not None
        deadline_s = time.monotonic() + self._answer_s
        self._line.settimeout(self._answer_s)  # of sending all, not of each part
        self._line.sendall(question.encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            self._line.settimeout(max(0.001, deadline_s - time.monotonic()))
            part = self._line.recv(_READ_BYTES)
            if not part:
                raise ConnectionError("its process died")
            said += part
        return said

    def end(self, grace_s: float = 0.0) -> None:
        """End the process, by closing its input or, after ``grace_s``, by a kill; the next question starts another."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            end_helper(self._process, grace_s)


# Kills and reaps processes together with all they started, and sweeps those that a killed session left.


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
