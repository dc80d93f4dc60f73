"""This process and others: parents, signals, helpers with limits, and kills of all that one started."""

import ctypes
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, final

import psutil

from dryfit.settings.files import appending
from dryfit.settings.wire import MARKER_VARIABLE

# The current process: ends with its parent, ends by signals, ends its copies, and its peak memory.


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WATCH_EVERY_S = 1.0
_PARENT_GONE = 128 + signal.SIGKILL


def _ask_kernel() -> bool:
    """Ask Linux to kill this process when the thread that made it ends."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_EVERY_S)
    os._exit(_PARENT_GONE)


def die_with_parent(parent_pid: int) -> None:
    """Make this process end when its parent does, however the parent ends.

    The setting is not inherited: every descendant (a data loader's worker too) must call this itself. On Linux the
    kernel sends SIGKILL; elsewhere a daemon thread watches. Returns only if the parent is alive.

    Args:
        parent_pid: The parent's process id, read *by the parent* or before the fork, so that a parent that has died
            since is noticed: this process then has another one.
    """
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(parent_pid,), name="dryfit-parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:
        os._exit(_PARENT_GONE)


@final
class CopiesEndHere:
    """A block of code at whose end forked copies of this process (``os.fork``) exit.

    They end as Python would end them, with their status and their traceback: what follows the block is this process's
    own to do.
    """

    def __enter__(self) -> None:
        """Note whose block it is."""
        self._pid = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a copy; let this process go on."""
        if os.getpid() == self._pid:
            return
        code = error.code if isinstance(error, SystemExit) else error
        if isinstance(code, BaseException) and kind is not None:
            sys.excepthook(kind, code, trace)
        elif code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        _leave(code if isinstance(code, int) else int(code is not None))


def _leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def end_of_command(number: int, _frame: FrameType | None) -> None:
    """Signal handler that ends this process, as the default action does.

    Its being installed marks a process that runs one command. Such a process may ignore further signals once its work
    was stopped, so that its exit status shows how it ended.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class _EndedBySignal(BaseException):
    """A signal that ends this process, while it still has something to put away."""


@contextmanager
def ended_by_signals() -> Generator[None, None, None]:
    """Run the block's cleanup when a signal ends this process, then let the signal end it.

    Only signals that would end it anyway are handled, and only in its main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        if not caught:
            caught.append(number)
            raise _EndedBySignal

    ending = (signal.SIG_DFL, end_of_command)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    handled = {number: handler for number, handler in before.items() if handler in ending}
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    except _EndedBySignal:
        signal.signal(caught[0], signal.SIG_DFL)
        os.kill(os.getpid(), caught[0])
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


def let_signals_through() -> None:
    """Undo inherited signal settings: blocked signals, and an ignored SIGCHLD.

    A mask survives ``exec``. With SIGCHLD blocked, the end of a child is never noticed; with it ignored, the kernel
    keeps no exit status.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_by_signals_alone() -> None:
    """Install :func:`end_of_command` for a scheduler's signals; ignored signals, as under ``nohup``, stay ignored."""
    let_signals_through()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end_of_command)


def ask_no_one() -> None:
    """Replace standard input by an empty terminal of usual size: each read ends at once."""
    _, terminal = pty.openpty()  # the other end stays open: with it the terminal would go
    settings = termios.tcgetattr(terminal)
    settings[3] &= ~(termios.ICANON | termios.ECHO)
    settings[6][termios.VMIN] = settings[6][termios.VTIME] = 0
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    termios.tcsetwinsize(terminal, (24, 80))
    os.dup2(terminal, 0)
    os.close(terminal)


def peak_rss_bytes() -> int:
    """Return the peak host memory of this process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# Start, ask and end a process of dryfit's own beside this one. Every wait has a limit.


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
