"""Start, watch and stop the mirror process. Nothing here raises, or waits for it without a limit."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from dryfit.core.errors import MachineError
from dryfit.core.regular_files import appending, contents
from dryfit.core.text.secrets import public_environment

ENVIRONMENT_PREFIX = "env:"

JOURNAL_PREFIX = "journal:"
_OF_DRIVERS = frozenset({"PGPASSWORD", "MYSQL_PWD"})
"""Variables that the clients of PostgreSQL and MySQL read passwords from."""

LONGEST_PAUSE_S = 60.0
"""A storage that cannot be written, or a mirror that dies, is tried again at least so often."""

_STARTS_AT_END = 2
_POLL_S = 0.02
_STOP_GRACE_S = 5.0
_KILL_GRACE_S = 2.0


def pause_after(failures: int) -> float:
    """Return how many seconds to wait after so many failures before: 1, 2, 4 ... up to :data:`LONGEST_PAUSE_S`."""
    return min(LONGEST_PAUSE_S, 2.0 ** min(failures, 10))


def storage_url(storage: str, environment: Mapping[str, str]) -> str:
    """Return the URL that ``env:NAME`` stands for, or any other storage as it is.

    Raises:
        MachineError: There is no such variable.
    """
    if not storage.startswith(ENVIRONMENT_PREFIX):
        return storage
    name = storage.removeprefix(ENVIRONMENT_PREFIX)
    if not environment.get(name):
        raise MachineError(
            f'opening search.mirror = "{storage}"',
            f"the environment variable {name} is not set",
            "a variable that holds an Optuna storage URL",
            f"export {name}=postgresql://...",
        )
    return environment[name]


def mirror_environment(storage: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the mirror: of the secrets, it has the storage's URL and what database drivers read."""
    if storage.startswith(JOURNAL_PREFIX):
        return public_environment(environment)
    return public_environment(environment, keep=_OF_DRIVERS | {storage.removeprefix(ENVIRONMENT_PREFIX)})


class MirrorProcess:
    """The process that keeps an Optuna storage equal to a study's ledger.

    Args:
        ledger: The study's ledger.
        storage: ``journal:PATH``, ``env:NAME`` or an Optuna storage URL.
        study: Name of the study in the storage; later generations have names of their own, see the ledger.
        status: File in which the mirror says how far it is.
        log: File for its output.
    """

    def __init__(self, ledger: Path, *, storage: str, study: str, status: Path, log: Path) -> None:
        self._ledger = ledger
        self._storage = storage
        self._study = study
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
        command = [sys.executable, "-P", "-m", "dryfit.search.mirror.process"]
        command += ["--ledger", str(self._ledger), "--storage", "-", "--study", self._study]
        command += ["--status", str(self._status), "--parent", str(os.getpid())]
        try:
            self._status.unlink(missing_ok=True)
            with appending(self._log) as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=mirror_environment(self._storage, os.environ),
                    start_new_session=True,
                )
        except OSError:  # no process, no descriptor, no disk: the study goes on, and it is tried again
            self._process = None
            return
        with suppress(OSError):  # it died already
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(self._storage.encode() + b"\n")

    def keep_alive(self) -> None:
        """Start it again where it died, later and later where it dies again and again. Costs one ``waitpid``."""
        if self._ended or self.alive:
            return
        if time.monotonic() >= self._started_s + pause_after(self._starts - 1):
            self.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that the ledger holds now is mirrored; nothing more will be written to it.

        A mirror that waits for its storage to come back tries once more, now, and ends.

        Returns:
            Whether it is; False after ``timeout_s``, or as soon as that last try has failed.
        """
        try:
            size = self._ledger.stat().st_size
        except FileNotFoundError:
            return True
        deadline_s = time.monotonic() + timeout_s
        starts_left = _STARTS_AT_END
        while mirrored_bytes(self._status) < size:
            if not self.alive:
                if starts_left == 0:
                    return False
                starts_left -= 1
                self.start()
            elif storage_error(self._status):
                self._end(max(0.0, deadline_s - time.monotonic()))
                return mirrored_bytes(self._status) >= size
            elif time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def stop(self) -> None:
        """Terminate it, and kill it if it does not end in time."""
        self._end(_STOP_GRACE_S)

    def _end(self, grace_s: float) -> None:
        """Ask it to mirror what is left and to end; kill it after a while."""
        self._ended = True
        if self._process is None:
            return
        if self.alive:
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies with us
                self._process.wait(_KILL_GRACE_S)


def mirrored_bytes(status: Path) -> int:
    """Return how many bytes of the ledger are mirrored, from the mirror's status file; -1: unknown."""
    try:
        return int(_said(status)["offset"])
    except (ValueError, KeyError, TypeError):
        return -1


def storage_error(status: Path) -> tuple[float, str] | None:
    """Return since when the mirror's storage cannot be written (Unix seconds), and the error; None: it can be."""
    said = _said(status)
    since_s, error = said.get("failing_since_s"), said.get("error")
    return (float(since_s), error) if isinstance(since_s, int | float) and isinstance(error, str) else None


def _said(status: Path) -> dict[str, Any]:
    try:
        said = json.loads(contents(status) or b"")
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}
