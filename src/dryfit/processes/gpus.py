"""The GPUs as the NVIDIA driver sees them, asked in a process of its own."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from dryfit.processes.helpers import Answering, carries_marker, lives, python_command
from dryfit.settings.secrets import public_environment
from dryfit.settings.wire import MARKER_VARIABLE, Wire

# The GPUs as the NVIDIA driver sees them: memory, the processes that hold it, and hardware errors.
#
# The driver's library NVML is used, which makes no CUDA context and so takes no memory of a device. A missing or
# silent driver is no error: nothing is known then.


FALLEN_OFF = 79
"""Xid of a GPU that has fallen off the bus (NVIDIA, "XID Errors"); NVML reports it as an error of its own."""

_EVENTS_MAX = 256


class ProcessOwner(StrEnum):
    """Whether a process on a device is ours."""

    OURS = "ours"
    GONE = "gone"
    """Ours, and ended; the driver still counts memory for it."""
    OTHER = "other"
    HIDDEN = "hidden"
    """Unknown: the process cannot be seen, as from inside a container."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a device; ``used_bytes`` is None if the driver does not report it."""

    pid: int
    used_bytes: int | None
    owner: ProcessOwner


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a device at one moment.

    Attributes:
        total_bytes: Memory available to programs.
        used_bytes: The part of it that is in use.
        processes: The processes that hold memory, as far as the driver reports them.
        memory_errors: Uncorrected ECC errors since the driver was loaded; None if they are not counted.
    """

    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    memory_errors: int | None = None

    @property
    def free_bytes(self) -> int:
        """Memory not in use."""
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def unaccounted_bytes(self) -> int:
        """Memory in use that belongs to no listed process."""
        return max(0, self.used_bytes - sum(process.used_bytes or 0 for process in self.processes))

    @property
    def owners_known(self) -> bool:
        """Whether the memory and the owner of every process are known."""
        hidden = ProcessOwner.HIDDEN
        return all(process.used_bytes is not None and process.owner is not hidden for process in self.processes)

    def held_bytes(self, owner: ProcessOwner) -> int:
        """Return the memory that processes of one owner hold."""
        return sum(process.used_bytes or 0 for process in self.processes if process.owner is owner)

    def neighbour_bytes(self, planned_bytes: int, *, ours: bool) -> int:
        """Return the memory that other programs hold.

        If the driver does not report which part is ours, our planned memory is taken for it.

        Args:
            planned_bytes: Planned memory of our processes on the device.
            ours: Whether any of our processes should be there.
        """
        blind = ours and not self.held_bytes(ProcessOwner.OURS) and (not self.processes or not self.owners_known)
        ours_bytes = planned_bytes if blind else self.held_bytes(ProcessOwner.OURS)
        return max(0, self.used_bytes - ours_bytes)


class GpuMonitor:
    """Reports the state of GPUs, each named as in ``CUDA_VISIBLE_DEVICES``. This one knows nothing of any."""

    def look(self, device: str) -> GpuState | None:
        """Return the state of a device now; None if it is unknown."""

    def mark_own(self, pid: int) -> None:
        """Remember that a process is ours, which cannot be seen any more once it has ended."""

    def xids(self, device: str) -> tuple[int, ...]:
        """Return the critical errors (Xids) of a device since it was first queried, oldest first."""
        del device
        return ()

    def set_uuids(self, uuids: Mapping[str, str]) -> None:
        """Learn the UUIDs of device names: CUDA and NVML may count devices in different orders."""


@dataclass(slots=True)
class _Known:
    """An open handle of a device, and the errors reported so far."""

    handle: Any
    physical: str
    xids: list[int] = field(default_factory=list[int])


class NvmlMonitor(GpuMonitor):
    """Monitors the GPUs of this machine by NVML, from the first query until :meth:`close`.

    Args:
        marker: The marker in the environment of our processes.
        nvml: A replacement for the module ``pynvml``, for tests.
        is_ours: Whether a living process carries a marker.
        lives: Whether a process lives, as far as can be seen from here.
    """

    def __init__(
        self,
        marker: str,
        nvml: Any = None,
        is_ours: Callable[[int, str], bool] = carries_marker,
        lives: Callable[[int], bool] = lives,
    ) -> None:
        self._nvml: Any = nvml
        self._is_ours = is_ours
        self._marker = marker
        self._lives = lives
        self._opened: bool | None = None
        self._uuids: dict[str, str] = {}
        self._known: dict[str, _Known | None] = {}
        self._own: set[int] = set()
        self._events: Any = None

    def set_uuids(self, uuids: Mapping[str, str]) -> None:
        """See :class:`GpuMonitor`."""
        self._uuids.update(uuids)
        self._known.clear()

    def mark_own(self, pid: int) -> None:
        """See :class:`GpuMonitor`."""
        self._own.add(pid)

    def look(self, device: str) -> GpuState | None:
        """See :class:`GpuMonitor`."""
        known = self._find(device)
        if known is None:
            return None
        nvml = self._nvml
        try:
            total_bytes, used_bytes = self._memory(known.handle)
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(known.handle)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST and FALLEN_OFF not in known.xids:
                known.xids.append(FALLEN_OFF)
            return None
        processes = tuple(self._process(int(process.pid), process.usedGpuMemory) for process in listed)
        return GpuState(total_bytes, used_bytes, processes, self._memory_errors(known.handle))

    def xids(self, device: str) -> tuple[int, ...]:
        """See :class:`GpuMonitor`."""
        known = self._find(device)
        self._read_events()
        return () if known is None else tuple(known.xids)

    def close(self) -> None:
        """Shut NVML down; nothing is known afterwards."""
        if self._opened:
            with suppress(self._nvml.NVMLError):  # the driver is gone already
                if self._events is not None:
                    self._nvml.nvmlEventSetFree(self._events)
                self._nvml.nvmlShutdown()
        self._opened, self._events = False, None
        self._known.clear()

    def _open(self) -> bool:
        if self._opened is None:
            self._nvml = self._nvml or import_module("pynvml")
            try:
                self._nvml.nvmlInit()
                self._opened = True
            except self._nvml.NVMLError:
                self._opened = False
        return self._opened

    def _find(self, device: str) -> _Known | None:
        if not self._open():
            return None
        if device not in self._known:
            try:
                handle = self._handle(device)
                self._known[device] = None if handle is None else self._watched(handle)
            except self._nvml.NVMLError:
                self._known[device] = None
        return self._known[device]

    def _handle(self, device: str) -> Any:
        """Return the handle of a device name; None if no device, or more than one, matches."""
        nvml, uuid = self._nvml, self._uuids.get(device, "")
        if not uuid and device.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(device))
        # CUDA accepts the beginning of a UUID; torch's UUIDs have no prefix of their kind.
        wanted = (f"GPU-{uuid}", f"MIG-{uuid}") if uuid else (device,)
        matches = [handle for handle in self._all() if nvml.nvmlDeviceGetUUID(handle).startswith(wanted)]
        return matches[0] if len(matches) == 1 else None

    def _all(self) -> Iterator[Any]:
        """Yield every device, and its MIG instances."""
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield handle
            try:
                parts = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
            except nvml.NVMLError:
                continue  # a device without MIG
            for part in parts:
                try:
                    yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
                except nvml.NVMLError:
                    continue  # no such instance now

    def _watched(self, handle: Any) -> _Known:
        """Register for the critical errors of a device, if the driver reports them."""
        nvml, physical = self._nvml, handle
        with suppress(nvml.NVMLError):  # a whole device
            physical = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        uuid = str(nvml.nvmlDeviceGetUUID(physical))
        with suppress(nvml.NVMLError):  # not on this device, or not allowed
            if nvml.nvmlDeviceGetSupportedEventTypes(physical) & nvml.nvmlEventTypeXidCriticalError:
                self._events = self._events or nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(physical, nvml.nvmlEventTypeXidCriticalError, self._events)
        return _Known(handle, uuid)

    def _read_events(self) -> None:
        nvml = self._nvml
        for _ in range(_EVENTS_MAX):
            if self._events is None:
                return
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = str(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError:
                return  # nothing new
            for known in self._known.values():
                if known is not None and known.physical == uuid:
                    known.xids.append(int(event.eventData))

    def _memory(self, handle: Any) -> tuple[int, int]:
        """Return total and used bytes, without the driver's reserve where it is reported (driver 510 and later)."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return int(memory.total) - int(memory.reserved), int(memory.used)
        except nvml.NVMLError:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return int(memory.total), int(memory.used)

    def _memory_errors(self, handle: Any) -> int | None:
        nvml = self._nvml
        try:
            kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            return int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))
        except nvml.NVMLError:
            return None

    def _process(self, pid: int, used_bytes: int | None) -> GpuProcess:
        if self._is_ours(pid, self._marker):
            self._own.add(pid)
            owner = ProcessOwner.OURS
        elif self._lives(pid):  # a process id of ours may have been reused meanwhile
            owner = ProcessOwner.OTHER
        else:
            owner = ProcessOwner.GONE if pid in self._own else ProcessOwner.HIDDEN
        return GpuProcess(pid, used_bytes, owner)


# A GPU monitor in a process of its own, so that a driver that hangs cannot block the control process.


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
    """The state and the errors of the device; see :class:`~dryfit.processes.gpus.GpuMonitor`."""

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
        command = python_command("dryfit.processes.nvml_process", str(os.getpid()), marker)
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
        """See :class:`~dryfit.processes.gpus.GpuMonitor`."""
        answer = self._ask(device, look=True)
        return None if answer is None else answer.look

    def xids(self, device: str) -> tuple[int, ...]:
        """See :class:`~dryfit.processes.gpus.GpuMonitor`."""
        answer = self._ask(device, look=False)
        return () if answer is None else answer.xids

    def mark_own(self, pid: int) -> None:
        """See :class:`~dryfit.processes.gpus.GpuMonitor`; sent with the next query."""
        self._own.append(pid)

    def set_uuids(self, uuids: Mapping[str, str]) -> None:
        """See :class:`~dryfit.processes.gpus.GpuMonitor`; sent with the next query."""
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
