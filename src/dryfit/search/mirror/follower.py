"""Start, watch and stop a process that follows a ledger. Nothing here raises, or waits for it without a limit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from dryfit.core.regular_files import appending, contents

LONGEST_PAUSE_S = 60.0
"""What cannot be written, or a follower that dies, is tried again at least so often."""

_STARTS_AT_END = 2
_POLL_S = 0.02
_STOP_GRACE_S = 5.0
_KILL_GRACE_S = 2.0


def pause_after(failures: int) -> float:
    """Return how many seconds to wait after so many failures before: 1, 2, 4 ... up to :data:`LONGEST_PAUSE_S`."""
    return min(LONGEST_PAUSE_S, 2.0 ** min(failures, 10))


class FollowerProcess:
    """A process that writes what a study's ledger says to somewhere else.

    Args:
        ledger: The study's ledger.
        module: What the process runs; it takes ``--ledger``, ``--status`` and ``--parent``, as
            :func:`dryfit.search.mirror.following.follower_options` reads them.
        arguments: Its further arguments. Every user of a machine sees them.
        target: Where it writes; it reads that from its stdin.
        environment: Returns the environment of the process.
        status: File in which it says how far it is.
        log: File for its output.
    """

    def __init__(
        self,
        ledger: Path,
        *,
        module: str,
        arguments: Sequence[str],
        target: str,
        environment: Callable[[], dict[str, str]],
        status: Path,
        log: Path,
    ) -> None:
        self._ledger = ledger
        self._command = [sys.executable, "-P", "-m", module, "--ledger", str(ledger), *arguments]
        self._command += ["--status", str(status)]
        self._target = target
        self._environment = environment
        self._status = status
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._starts = 0
        self._started_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id; None where it never started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; call from the main thread (its death is tied to the thread that made it)."""
        now_s = time.monotonic()
        # One that ran for long begins anew: it was no failure of its start.
        self._starts = self._starts + 1 if now_s - self._started_s < LONGEST_PAUSE_S else 1
        self._started_s = now_s
        try:
            self._status.unlink(missing_ok=True)
            with appending(self._log) as log:
                self._process = subprocess.Popen(
                    [*self._command, "--parent", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment(),
                    start_new_session=True,
                )
        except OSError:  # no process, no descriptor, no disk: the study goes on, and it is tried again
            self._process = None
            return
        with suppress(OSError):  # it died already
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(self._target.encode() + b"\n")

    def keep_alive(self) -> None:
        """Start it again where it died, later and later where it dies again and again. Costs one ``waitpid``."""
        if self._ended or self.alive:
            return
        if time.monotonic() >= self._started_s + pause_after(self._starts - 1):
            self.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that the ledger holds now is written; nothing more will be added to it.

        A follower that waits for its target to come back tries once more, now, and ends.

        Returns:
            Whether it is; False after ``timeout_s``, or as soon as that last try has failed.
        """
        try:
            size = self._ledger.stat().st_size
        except FileNotFoundError:
            return True
        deadline_s = time.monotonic() + timeout_s
        starts_left = _STARTS_AT_END
        while followed_bytes(self._status) < size:
            if not self.alive:
                if starts_left == 0:
                    return False
                starts_left -= 1
                self.start()
            elif trouble_of(self._status):
                self._end(max(0.0, deadline_s - time.monotonic()))
                return followed_bytes(self._status) >= size
            elif time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def ask_to_end(self) -> None:
        """Ask it to write what is left and to end; does not wait."""
        self._ended = True
        if self._process is not None and self.alive:
            self._process.terminate()

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Terminate it, and kill it if it does not end in time."""
        self._end(grace_s)

    def _end(self, grace_s: float) -> None:
        """Ask it to write what is left and to end; kill it, and what it has started, after a while."""
        self.ask_to_end()
        if self._process is None:
            return
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies with us
                self._process.wait(_KILL_GRACE_S)


def followed_bytes(status: Path) -> int:
    """Return how many bytes of the ledger are written, from a follower's status file; -1: unknown."""
    try:
        return int(said_in(status)["offset"])
    except (ValueError, KeyError, TypeError):
        return -1


def trouble_of(status: Path) -> tuple[float, str] | None:
    """Return since when a follower's target cannot be written (Unix seconds), and the error; None: it can be."""
    said = said_in(status)
    since_s, error = said.get("failing_since_s"), said.get("error")
    return (float(since_s), error) if isinstance(since_s, int | float) and isinstance(error, str) else None


def said_in(status: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; empty where there is none."""
    try:
        said = json.loads(contents(status) or b"")
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}
