"""The current process: ends with its parent, ends by signals, ends its copies, and its peak memory."""

import ctypes
import fcntl
import os
import pty
import resource
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import final

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
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # Python 3.10 has no name for it
    os.dup2(terminal, 0)
    os.close(terminal)


def peak_rss_bytes() -> int:
    """Return the peak host memory of this process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
