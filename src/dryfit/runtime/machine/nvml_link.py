"""A GPU monitor in a process of its own, so that a driver that hangs cannot block the control process."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError

from dryfit.core.helper import Answering, python_command
from dryfit.core.text.secrets import public_environment
from dryfit.core.wire import MARKER_VARIABLE, Wire
from dryfit.runtime.machine.gpus import GpuMonitor, GpuState

ANSWER_S = 30.0
"""How long an answer may take. The first is the slowest: without persistence mode, the driver wakes every device."""

_END_S = 2.0


class NvmlQuestion(Wire):
    """A query of a device, with what is new since the last query.

    Attributes:
        device: Its name as in ``CUDA_VISIBLE_DEVICES``.
        look: Whether to return its state; its errors are always returned.
        uuids: UUIDs by device name.
        own: Ids of processes of ours that have begun.
    """

    model_config = ConfigDict(cache_strings="keys")

    device: str
    look: bool
    uuids: dict[str, str] = Field(default_factory=dict[str, str])
    own: tuple[int, ...] = ()


class NvmlAnswer(Wire):
    """The state and the errors of the device; see :class:`~dryfit.runtime.machine.gpus.GpuMonitor`."""

    model_config = ConfigDict(cache_strings="keys")

    look: GpuState | None
    xids: tuple[int, ...]


class NvmlLink(GpuMonitor):
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
        command = python_command("dryfit.runtime.machine.nvml_process", str(os.getpid()), marker)
        environment = {**public_environment(os.environ), MARKER_VARIABLE: marker}
        self._process = Answering(command, environment=environment, log=log, answer_s=answer_s)
        self._log = log
        self._note = note
        self._answer_s = answer_s
        self._silent = False
        self._uuids: dict[str, str] = {}
        self._own: list[int] = []

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it has not started."""
        return self._process.pid

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
        self._process.end(_END_S)

    def _ask(self, device: str, *, look: bool) -> NvmlAnswer | None:
        if self._silent:
            return None
        question = NvmlQuestion(device=device, look=look, uuids=self._uuids, own=tuple(self._own))
        try:
            answer = NvmlAnswer.model_validate_json(self._process.ask(question.model_dump_json()))
        except TimeoutError:
            self._process.end()
            self._give_up(f"has not answered for {self._answer_s:g} s")
        except (OSError, ValidationError) as error:
            self._give_up(f"cannot be asked ({error}; see {self._log})")
        else:
            self._uuids, self._own = {}, []
            return answer
        return None

    def _give_up(self, why: str) -> None:
        self.close()
        self._note(
            f"the GPU driver (NVML) {why}: this session goes on without what it tells, "
            "as memory of other programs and the driver's own errors; see whether `nvidia-smi` answers"
        )
