"""The control process's connection to its fork server: starts it, sends requests, and receives messages."""

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dryfit.core.helper import end_helper, python_command, start_helper
from dryfit.runtime.children.environment import secrets_as_input
from dryfit.runtime.children.protocol import SERVER_MESSAGE, ForkRequest, LineBuffer, ServerMessage

_READ_BYTES = 65_536
_END_S = 5.0


class ServerLink:
    """One fork server process.

    Args:
        modules: The modules that it imports.
        environment: Its whole environment.
        secrets: As for :func:`dryfit.runtime.children.child.run_child`.
        log: Where its output is appended.
    """

    def __init__(
        self, modules: tuple[str, ...], environment: dict[str, str], secrets: Mapping[str, str], log: Path
    ) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._lines = LineBuffer()
        self._unsent = b""
        self.ready = False
        self.lost = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, secrets_as_input(secrets) as stdin:
            arguments = (str(theirs.fileno()), str(os.getpid()), *modules)
            command = python_command("dryfit.runtime.children.fork_server", *arguments)
            self._process = start_helper(
                command, environment=environment, log=log, stdin=stdin, keep=(theirs.fileno(),)
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def fileno(self) -> int:
        """File descriptor to select on."""
        return self._connection.fileno()

    def ask(self, request: ForkRequest) -> None:
        """Ask for a fork; what the socket does not take now is sent later."""
        self._unsent += request.model_dump_json().encode() + b"\n"
        self._flush()

    def receive(self) -> list[ServerMessage]:
        """Return the server's messages since the last call; sets ``lost`` if it is gone."""
        self._flush()
        messages: list[ServerMessage] = []
        while not self.lost:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.lost = not data
            messages += [SERVER_MESSAGE.validate_json(line) for line in self._lines.feed(data)]
        return messages

    def close(self) -> None:
        """End the server: it ends with the connection, and is killed if it does not."""
        self._connection.close()
        end_helper(self._process, _END_S if self.ready and not self.lost else 0)

    def kill(self) -> None:
        """Kill the server, and by their death signals its children."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _flush(self) -> None:
        if self._unsent and not self.lost:
            try:
                sent = self._connection.send(self._unsent)
                self._unsent = self._unsent[sent:]
            except BlockingIOError:
                pass
            except ConnectionError:
                self.lost = True
