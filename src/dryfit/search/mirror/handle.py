"""Start, watch and stop the mirror process. Nothing here raises, or waits for it without a limit."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dryfit.core.errors import MachineError

ENVIRONMENT_PREFIX = "env:"

_MOST_RESTARTS = 3
_POLL_S = 0.02
_STOP_GRACE_S = 5.0
_KILL_GRACE_S = 2.0


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
        self._restarts_left = _MOST_RESTARTS

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
        command = [sys.executable, "-P", "-m", "dryfit.search.mirror.process"]
        command += ["--ledger", str(self._ledger), "--storage", "-", "--study", self._study]
        command += ["--status", str(self._status), "--parent", str(os.getpid())]
        try:
            self._status.unlink(missing_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
        except OSError:  # no process, no descriptor, no disk: the study goes on without a mirror
            self._restarts_left = 0
            return
        with suppress(OSError):  # it died already
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(self._storage.encode() + b"\n")

    def keep_alive(self) -> None:
        """Start it again where it died, a few times at most. Costs one ``waitpid``."""
        if self._process is not None and not self.alive and self._restarts_left > 0:
            self._restarts_left -= 1
            self.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that the ledger holds now is mirrored.

        Returns:
            Whether it is; False after ``timeout_s``, or at once where the mirror is dead for good.
        """
        try:
            size = self._ledger.stat().st_size
        except FileNotFoundError:
            return True
        deadline_s = time.monotonic() + timeout_s
        while mirrored_bytes(self._status) < size:
            self.keep_alive()
            if not self.alive or time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def stop(self) -> None:
        """Terminate it, and kill it if it does not end in time."""
        if self._process is None:
            return
        self._restarts_left = 0
        if self.alive:
            self._process.terminate()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies with us
                self._process.wait(_KILL_GRACE_S)


def mirrored_bytes(status: Path) -> int:
    """Return how many bytes of the ledger are mirrored, from the mirror's status file; -1: unknown."""
    try:
        said: dict[str, Any] = json.loads(status.read_bytes())
        return int(said["offset"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
