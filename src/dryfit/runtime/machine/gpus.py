"""What the driver knows of the GPUs: who holds memory there, which errors it saw.

NVML is asked, the driver's own library. It makes no CUDA context, so the process that asks takes nothing of a device.
Where there is no driver, or it does not answer, nothing is known, and that is no error.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any, Protocol

from dryfit.runtime.children.processes import carries_marker, lives

FALLEN_OFF = 79
"""Xid of a GPU that has fallen off the bus (NVIDIA, "XID Errors"): NVML says so by an error of its own."""

_EVENTS_MAX = 256


class ProcessOwner(StrEnum):
    """Whose a process on a device is."""

    OURS = "ours"
    GONE = "gone"
    """It was ours and has ended; the driver still counts memory for it."""
    OTHER = "other"
    HIDDEN = "hidden"
    """Nobody knows: its process cannot be seen from here, as from inside a container."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a device; ``used_bytes`` is None where the driver does not tell."""

    pid: int
    used_bytes: int | None
    owner: ProcessOwner


@dataclass(frozen=True, slots=True)
class GpuState:
    """A device at one moment.

    Attributes:
        total_bytes: What programs may have of it.
        used_bytes: What is taken of that.
        processes: Who holds memory, as far as the driver tells.
        memory_errors: Uncorrected ECC errors since the driver was loaded; None: nobody counts.
    """

    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    memory_errors: int | None = None

    @property
    def free_bytes(self) -> int:
        """What is not taken."""
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def unaccounted_bytes(self) -> int:
        """What is taken and belongs to no process that is listed."""
        return max(0, self.used_bytes - sum(one.used_bytes or 0 for one in self.processes))

    @property
    def owners_known(self) -> bool:
        """Whether what is ours can be told from what is not."""
        return all(one.used_bytes is not None and one.owner is not ProcessOwner.HIDDEN for one in self.processes)

    def held_bytes(self, owner: ProcessOwner) -> int:
        """What processes of one kind hold."""
        return sum(one.used_bytes or 0 for one in self.processes if one.owner is owner)

    def neighbour_bytes(self, planned_bytes: int, *, ours: bool) -> int:
        """What others hold.

        Where the driver does not say which part is ours, ours is taken to be what was planned for it.

        Args:
            planned_bytes: What our processes there were planned with.
            ours: Whether any of ours should be there.
        """
        blind = ours and not self.held_bytes(ProcessOwner.OURS) and (not self.processes or not self.owners_known)
        ours_bytes = planned_bytes if blind else self.held_bytes(ProcessOwner.OURS)
        return max(0, self.used_bytes - ours_bytes)


class GpuMonitor(Protocol):
    """Who can be asked of devices; each is named as ``CUDA_VISIBLE_DEVICES`` takes it."""

    def look(self, device: str) -> GpuState | None:
        """How a device is now; None: nothing is known."""
        ...

    def own(self, pid: int) -> None:
        """Remember that a process is ours: once it is gone, nobody can tell."""
        ...

    def xids(self, device: str) -> tuple[int, ...]:
        """The critical errors that the driver reported of a device since it was looked at first, oldest first."""
        ...

    def know(self, uuids: Mapping[str, str]) -> None:
        """Learn which hardware names mean: CUDA and NVML need not count devices in the same order."""
        ...


class NoGpuMonitor:
    """Of whose devices nothing is known."""

    def look(self, device: str) -> GpuState | None:
        """Nothing."""
        del device
        return None

    def own(self, pid: int) -> None:
        """Nothing to remember."""

    def xids(self, device: str) -> tuple[int, ...]:
        """None."""
        del device
        return ()

    def know(self, uuids: Mapping[str, str]) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class _Known:
    """A device that was found."""

    handle: Any
    physical: str
    xids: list[int] = field(default_factory=list[int])


class NvmlMonitor:
    """The devices of this machine. NVML is loaded when the first one is looked at; :meth:`close` lets go of it.

    Args:
        marker: What our processes carry in their environment.
        nvml: A stand-in for the module ``pynvml``.
        is_ours: Whether a living process carries a marker.
        lives: Whether there is such a process, as far as can be seen from here.
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

    def know(self, uuids: Mapping[str, str]) -> None:
        """As in :class:`GpuMonitor`."""
        self._uuids.update(uuids)
        self._known.clear()

    def own(self, pid: int) -> None:
        """As in :class:`GpuMonitor`."""
        self._own.add(pid)

    def look(self, device: str) -> GpuState | None:
        """As in :class:`GpuMonitor`."""
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
        processes = tuple(self._process(int(one.pid), one.usedGpuMemory) for one in listed)
        return GpuState(total_bytes, used_bytes, processes, self._memory_errors(known.handle))

    def xids(self, device: str) -> tuple[int, ...]:
        """As in :class:`GpuMonitor`."""
        known = self._find(device)
        self._hear_events()
        return () if known is None else tuple(known.xids)

    def close(self) -> None:
        """Let go of NVML; nothing is known afterwards."""
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
        """The hardware that a name means; None where it is not found."""
        nvml, uuid = self._nvml, self._uuids.get(device, "")
        if not uuid and device.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(device))
        # CUDA takes the beginning of a UUID; what torch calls one has no kind before it.
        wanted = (f"GPU-{uuid}", f"MIG-{uuid}") if uuid else (device,)
        found = [handle for handle in self._all() if nvml.nvmlDeviceGetUUID(handle).startswith(wanted)]
        return found[0] if len(found) == 1 else None

    def _all(self) -> Iterator[Any]:
        """Every device, and the parts that it was cut into."""
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield handle
            try:
                parts = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
            except nvml.NVMLError:
                continue  # a device that cannot be cut
            for part in parts:
                try:
                    yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
                except nvml.NVMLError:
                    continue  # no such part now

    def _watched(self, handle: Any) -> _Known:
        """Ask the driver to tell of critical errors; where it does not, none is ever heard of."""
        nvml, physical = self._nvml, handle
        with suppress(nvml.NVMLError):  # a whole device
            physical = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        uuid = str(nvml.nvmlDeviceGetUUID(physical))
        with suppress(nvml.NVMLError):  # not on this device, or not allowed
            if nvml.nvmlDeviceGetSupportedEventTypes(physical) & nvml.nvmlEventTypeXidCriticalError:
                self._events = self._events or nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(physical, nvml.nvmlEventTypeXidCriticalError, self._events)
        return _Known(handle, uuid)

    def _hear_events(self) -> None:
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
        """Total and used bytes, without what the driver keeps for itself where it says so (driver 510 and later)."""
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
        elif self._lives(pid):  # a number of ours may have been given to somebody else meanwhile
            owner = ProcessOwner.OTHER
        else:
            owner = ProcessOwner.GONE if pid in self._own else ProcessOwner.HIDDEN
        return GpuProcess(pid, used_bytes, owner)
