"""Agents on the nodes of a Ray cluster: starts and ends the process that talks to Ray."""

import os
import select
import shlex
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dryfit.core.errors import MachineError
from dryfit.core.helper import python_command
from dryfit.core.regular_files import appending
from dryfit.store.layout import StudyLayout

_MODULE = "dryfit.nodes.launchers.ray_agents"
_CONNECT_S = 60.0
_MOST_SAID = 2000


@dataclass(slots=True)
class Ray:
    """An agent on each node of one cluster, which is there already: none is started.

    Attributes:
        layout: The study's folder.
        address: ``HOST:PORT`` of the cluster; ``auto``: as Ray finds it, by ``RAY_ADDRESS`` or on this machine.
    """

    layout: StudyLayout
    address: str
    _process: subprocess.Popen[bytes] | None = field(default=None)

    def text(self) -> str:
        """Return the command that starts the agents."""
        return shlex.join(self._command("$$")).replace("'$$'", "$$")

    def start(self) -> str:
        """Connect to the cluster; agents follow. Call from the main thread: the process ends with it.

        Raises:
            MachineError: There is no such cluster, or no Ray.
        """
        with appending(self._log) as log:
            process = subprocess.Popen(
                self._command(str(os.getpid())), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        self._process = process
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _CONNECT_S)
        said = process.stdout.readline().decode(errors="replace").strip() if readable else ""
        if not said.startswith("connected"):
            self.cancel(pending=False)
            why = self._last_words() or f"no answer in {_CONNECT_S:.0f} s"
            raise MachineError("starting agents with Ray", why, "a cluster of Ray that this machine belongs to")
        return said

    def trouble(self) -> str:
        """Return why no agents are to be expected any more; empty where some are."""
        if self._process is None or self._process.poll() is None:
            return ""
        return f"the process that starts agents with Ray has ended: {self._last_words() or self._log}"

    def waits(self) -> bool:
        """Whether it still ends agents."""
        return self._process is not None and self._process.poll() is None

    def cancel(self, *, pending: bool) -> None:
        """Ask it to end, which ends its agents; or kill it, and Ray ends them."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate() if pending else self._process.kill()
            if not pending:
                self._process.wait()

    def forget(self) -> None:
        """Nothing is kept of it."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def _log(self) -> Path:
        return self.layout.nodes / "ray.txt"

    def _command(self, parent: str) -> list[str]:
        return python_command(_MODULE, str(self.layout.folder), self.address, parent)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace")[-_MOST_SAID:].strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""
