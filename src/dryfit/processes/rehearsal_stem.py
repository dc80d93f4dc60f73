"""A process that has imported torch and the virtual GPU's code, and is forked for each rehearsal of one command.

Several devices, sizes and changes of arguments need a rehearsal each; only the first one pays for these imports. What a
script imports it imports in its own process, after the virtual GPU is there.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from dryfit.processes.helpers import kill_leftovers

STEM_OPTION: Final = "--stem"
_STATUS_BYTES: Final = 64
_AFTER_END_S: Final = 2.0
_POLL_S: Final = 0.01

Command = Callable[..., AbstractContextManager[list[str]]]
"""Provides the command that runs the module of rehearsals with some arguments; its files are there within the block."""


def in_own_session(
    words: Sequence[str], variables: Mapping[str, str], folder: Path | None, *, keeps: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, without input; what it prints, and its errors, go into one pipe.

    Args:
        words: What it runs.
        variables: Its whole environment.
        folder: Its working directory.
        keeps: Descriptors that it has besides.
    """
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        cwd=folder,
        start_new_session=True,
        pass_fds=keeps,
    )


class RehearsalStem:
    """Such a process; it imports from now on.

    Args:
        command: What it runs.
        variables: Its whole environment.
        folder: Its working directory.
    """

    def __init__(self, command: Command, variables: dict[str, str], folder: Path | None) -> None:
        self._ends = ExitStack()
        self._asking, theirs = socket.socketpair()
        self._ends.enter_context(self._asking)
        with theirs:
            words = self._ends.enter_context(command(STEM_OPTION, str(theirs.fileno()), str(os.getpid())))
            self._process = in_own_session(words, variables, folder, keeps=(theirs.fileno(),))
        self._asking.setblocking(False)
        self._status: int | None = None

    @property
    def output(self) -> int:
        """Descriptor of what its rehearsals print, one after the other."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, request: Path) -> None:
        """Begin the rehearsal of a request's file."""
        self._status = None
        self._asking.sendall(f"{request}\n".encode())

    def has_ended(self) -> bool:
        """Whether the rehearsal has ended, or this process has."""
        try:
            said = self._asking.recv(_STATUS_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            said = b""
        self._status = os.waitstatus_to_exitcode(int(said)) if said else self._process.wait()
        return True

    @property
    def status(self) -> int | None:
        """How the rehearsal ended: its exit status, or minus a signal; None: it has not."""
        return self._status

    def close(self) -> None:
        """End it, and the rehearsal that runs."""
        with self._ends:
            end_process(self._process)
            if self._process.stdout is not None:
                self._process.stdout.close()


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """End the leader of a session with all that it has started, whatever session that is in."""
    if process.returncode is None:
        process.terminate()
        last_s = time.monotonic() + _AFTER_END_S
        while not has_ended(process) and time.monotonic() < last_s:
            time.sleep(_POLL_S)
        kill_leftovers(process.pid)
        process.kill()
        process.wait()


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a child has ended; where the system can tell that, it is left to be reaped."""
    if sys.platform != "linux":
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


_stems: "ContextVar[dict[Hashable, RehearsalStem] | None]" = ContextVar("stems", default=None)


@contextmanager
def shared_imports() -> Generator[None, None, None]:
    """Within, rehearsals in the same surroundings fork from one process; it ends with the outermost block."""
    if _stems.get() is not None or sys.platform != "linux":
        yield
        return
    stems: dict[Hashable, RehearsalStem] = {}
    before = _stems.set(stems)
    try:
        yield
    finally:
        _stems.reset(before)
        for stem in stems.values():
            stem.close()


def stem_for(key: Hashable, make: Callable[[], RehearsalStem]) -> RehearsalStem | None:
    """Return the process for some surroundings; None where imports are not shared.

    Args:
        key: Equal for surroundings that are alike.
    """
    stems = _stems.get()
    if stems is None:
        return None
    stem = stems.get(key)
    if stem is not None and not stem.is_alive:
        stem.close()
        stem = None
    if stem is None:
        stem = stems[key] = make()
    return stem
