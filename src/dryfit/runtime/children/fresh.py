"""Children in new interpreters: slower to start than forks, and independent of the fork server."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dryfit.core.helper import kill_leftovers, python_command, start_helper
from dryfit.core.wire import LOG_FILE
from dryfit.runtime.children.environment import secrets_as_input


class FreshChild:
    """A child process in a new interpreter.

    Args:
        request_path: Its request.
        entry: ``module:function`` that does the job.
        environment: Its whole environment.
        secrets: As for :func:`dryfit.runtime.children.child.run_child`.

    Raises:
        OSError: The system cannot make another process.
    """

    def __init__(self, request_path: Path, entry: str, environment: dict[str, str], secrets: Mapping[str, str]) -> None:
        command = python_command("dryfit.runtime.children.child", str(request_path), entry, str(os.getpid()))
        with secrets_as_input(secrets) as stdin:
            self._process = start_helper(
                command, environment=environment, log=request_path.parent / LOG_FILE, stdin=stdin
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
        """Return the exit status, or minus the signal, once it has ended; kills what is left of its session first."""
        if sys.platform == "linux":
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        elif self._process.poll() is None:
            return None
        kill_leftovers(self.pid)
        return self._process.wait()

    def kill(self) -> None:
        """Kill it; until it is reaped, no other process can have its process id."""
        with suppress(ProcessLookupError):  # it was reaped
            os.kill(self.pid, signal.SIGKILL)  # ``Popen.kill`` would reap it, and :meth:`poll` would find nothing

    def release(self) -> None:
        """Close ``exit_fd``; call it once the process has ended and the descriptor is watched no more."""
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None
