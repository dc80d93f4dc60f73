"""A GPU monitor in a process of its own, so that a driver that hangs cannot block the control process."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from dryfit.core.regular_files import appending
from dryfit.core.text.secrets import public_environment
from dryfit.core.wire import MARKER_VARIABLE
from dryfit.runtime.children.protocol import LineBuffer, python_command
from dryfit.runtime.machine.gpus import GpuState
from dryfit.runtime.machine.nvml_protocol import NvmlAnswer, NvmlQuestion

ANSWER_S = 30.0
"""How long an answer may take. The first is the slowest: without persistence mode, the driver wakes every device."""

_READ_BYTES = 65_536
_END_S = 2.0


class NvmlLink:
    """Monitors the GPUs of this machine through a process that starts with the first query.

    After an answer that did not come in time, or if the process dies, the rest of the session goes on without GPU
    states, with one note about it.

    Args:
        marker: The marker in the environment of our processes.
        log: The file to append the process's output to.
        note: Prints a note.
        answer_s: How long an answer may take.
    """

    def __init__(self, marker: str, log: Path, note: Callable[[str], None], answer_s: float = ANSWER_S) -> None:
        self._marker = marker
        self._log = log
        self._note = note
        self._answer_s = answer_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._silent = False
        self._uuids: dict[str, str] = {}
        self._own: list[int] = []

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it has not started."""
        return None if self._process is None else self._process.pid

    def look(self, device: str) -> GpuState | None:
        """See :class:`~dryfit.runtime.machine.gpus.GpuMonitor`."""
        answer = self._ask(device, look=True)
        return None if answer is None else answer.look

    def xids(self, device: str) -> tuple[int, ...]:
        """See :class:`~dryfit.runtime.machine.gpus.GpuMonitor`."""
        answer = self._ask(device, look=False)
        return () if answer is None else answer.xids

    def mark_own(self, pid: int) -> None:
        """See :class:`~dryfit.runtime.machine.gpus.GpuMonitor`; sent with the next query."""
        self._own.append(pid)

    def set_uuids(self, uuids: Mapping[str, str]) -> None:
        """See :class:`~dryfit.runtime.machine.gpus.GpuMonitor`; sent with the next query."""
        self._uuids.update(uuids)

    def close(self) -> None:
        """End the process by closing the connection, and kill it if it stays; nothing is known afterwards."""
        self._silent = True
        if self._connection is not None:
            self._connection.close()
        if self._process is None:
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill(self._process)

    def _ask(self, device: str, *, look: bool) -> NvmlAnswer | None:
        if self._silent:
            return None
        question = NvmlQuestion(device=device, look=look, uuids=self._uuids, own=tuple(self._own))
        try:
            connection = self._connection or self._start()
            line = self._answer_line(connection, question.model_dump_json().encode() + b"\n")
            answer = NvmlAnswer.model_validate_json(line)
        except TimeoutError:
            if self._process is not None:
                self._kill(self._process)
            self._give_up(f"has not answered for {self._answer_s:g} s")
        except (OSError, ValidationError) as error:
            self._give_up(f"cannot be asked ({error}; see {self._log})")
        else:
            self._uuids, self._own = {}, []
            return answer
        return None

    def _start(self) -> socket.socket:
        self._connection, theirs = socket.socketpair()
        with theirs, appending(self._log) as output:
            arguments = (str(theirs.fileno()), str(os.getpid()), self._marker)
            self._process = subprocess.Popen(
                python_command("dryfit.runtime.machine.nvml_process", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**public_environment(os.environ), MARKER_VARIABLE: self._marker},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return self._connection

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies as soon as its call is over
            process.wait(_END_S)

    def _answer_line(self, connection: socket.socket, question: bytes) -> bytes:
        """Send a question and return the answer; raises ``OSError`` if none comes."""
        deadline_s = time.monotonic() + self._answer_s
        connection.settimeout(self._answer_s)
        connection.sendall(question)
        lines = LineBuffer()
        while True:
            connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
            data = connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the process that asks it has ended")
            complete = lines.feed(data)
            if complete:
                return complete[0]

    def _give_up(self, why: str) -> None:
        self.close()
        self._note(
            f"the GPU driver (NVML) {why}: this session goes on without what it tells, "
            "as memory of other programs and the driver's own errors; see whether `nvidia-smi` answers"
        )
