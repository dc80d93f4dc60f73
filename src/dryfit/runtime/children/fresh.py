"""Children in new interpreters: slower to start, and they depend on nothing but the operating system."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from dryfit.core.wire import LOG_FILE
from dryfit.runtime.children.processes import kill_leftovers
from dryfit.runtime.children.protocol import python_command


class FreshChild:
    """A child that is our own, started from nothing.

    Args:
        request_path: Its request.
        entry: ``module:function`` that does the job.
        environment: Its whole environment.

    Raises:
        OSError: The system cannot make another process.
    """

    def __init__(self, request_path: Path, entry: str, environment: dict[str, str]) -> None:
        with (request_path.parent / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                python_command("dryfit.runtime.children.child", str(request_path), entry, str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.exit_fd: int | None = None
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel before 5.3, or a sandbox without it: it is polled
                self.exit_fd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or minus the signal, once it has ended; what is left of its session is killed before."""
        if sys.platform == "linux":
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        elif self._process.poll() is None:
            return None
        kill_leftovers(self.pid)
        return self._process.wait()

    def kill(self) -> None:
        """Kill it, whatever ``/proc`` shows of it yet: until it is reaped, its process id is nobody else's."""
        with suppress(ProcessLookupError):  # it was reaped
            os.kill(self.pid, signal.SIGKILL)  # ``Popen.kill`` would reap it, and :meth:`poll` find nobody

    def release(self) -> None:
        """Close ``exit_fd``; call it once the process has ended and nobody watches the descriptor."""
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None
