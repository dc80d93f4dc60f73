"""Stand-ins for NVML: the module, here and for other processes; devices as the study's loop sees them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dryfit.processes.gpus import GpuProcess, GpuState, ProcessOwner

GIB = 2**30


class NVMLError(Exception):
    """As pynvml's: with a number."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass
class Board:
    """One device of the stand-in module; ``parts`` are what it was cut into."""

    uuid: str
    total: int = 24 * GIB
    reserved: int = GIB // 2
    processes: dict[int, int | None] = field(default_factory=dict)
    extra: int = 0
    parts: list["Board"] = field(default_factory=list)
    parent: "Board | None" = None
    lost: bool = False

    @property
    def used(self) -> int:
        return sum(size or 0 for size in self.processes.values()) + self.extra


class FakeNvml:
    """The functions of ``pynvml`` that are used; devices are handles of themselves."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlMemory_v2 = 2
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *boards: Board, driver: bool = True, old: bool = False, errors: int | None = 0) -> None:
        self.boards, self.driver, self.old, self.errors = boards, driver, old, errors
        self.events: list[tuple[Board, int]] = []
        self.registered: list[Board] = []
        self.inits = self.shutdowns = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError(12)
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        if index >= len(self.boards):
            raise NVMLError(2)
        return self.boards[index]

    def nvmlDeviceGetUUID(self, board: Board) -> str:
        return board.uuid

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:
        if not board.parts:
            raise NVMLError(3)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, index: int) -> Board:
        if index >= len(board.parts):
            raise NVMLError(6)
        return board.parts[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, board: Board) -> Board:
        if board.parent is None:
            raise NVMLError(2)
        return board.parent

    def nvmlDeviceGetMemoryInfo(self, board: Board, version: int | None = None) -> Any:
        if board.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if version is None:
            return SimpleNamespace(total=board.total, used=board.used + board.reserved)
        if self.old:
            raise NVMLError(13)
        return SimpleNamespace(total=board.total, reserved=board.reserved, used=board.used)

    def nvmlDeviceGetComputeRunningProcesses(self, board: Board) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in board.processes.items()]

    def nvmlDeviceGetTotalEccErrors(self, board: Board, kind: int, counter: int) -> int:
        if self.errors is None:
            raise NVMLError(3)
        return self.errors

    def nvmlDeviceGetSupportedEventTypes(self, board: Board) -> int:
        return self.nvmlEventTypeXidCriticalError

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, board: Board, types: int, events: str) -> None:
        assert types == self.nvmlEventTypeXidCriticalError and board.parent is None
        self.registered.append(board)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "nobody may be kept waiting"
        if not self.events:
            raise NVMLError(10)
        board, xid = self.events.pop(0)
        return SimpleNamespace(device=board, eventData=xid)

    def nvmlEventSetFree(self, events: str) -> None:
        assert events == "events"


@dataclass
class ScriptedDevices:
    """Devices that are as a test says; ``None`` of them: no driver."""

    looks: dict[str, GpuState | None] = field(default_factory=dict)
    reported: dict[str, list[int]] = field(default_factory=dict)
    owned: list[int] = field(default_factory=list)
    asked: int = 0
    uuids: dict[str, str] = field(default_factory=dict)

    def look(self, device: str) -> GpuState | None:
        self.asked += 1
        return self.looks.get(device)

    def mark_own(self, pid: int) -> None:
        self.owned.append(pid)

    def xids(self, device: str) -> tuple[int, ...]:
        return tuple(self.reported.get(device, ()))

    def set_uuids(self, uuids: Mapping[str, str]) -> None:
        self.uuids.update(uuids)

    def set(self, device: str, total_bytes: int, *processes: tuple[int, int, ProcessOwner], extra: int = 0) -> None:
        """Let a device have these processes; ``extra`` belongs to nobody that is listed."""
        listed = tuple(GpuProcess(pid, size, whose) for pid, size, whose in processes)
        used_bytes = sum(size for _, size, _ in processes) + extra
        self.looks[device] = GpuState(total_bytes, used_bytes, listed, memory_errors=0)


def read_processes(folder: Path) -> dict[int, int | None]:
    """Who holds memory of the device of a :class:`Driver`."""
    file = folder / "processes.json"
    if not file.exists():
        return {}
    return {int(pid): size for pid, size in json.loads(file.read_text(encoding="ascii")).items()}


@dataclass(frozen=True)
class Driver:
    """A driver that other processes find in the place of NVIDIA's, and what a test does to it meanwhile.

    Attributes:
        folder: Its state.
    """

    folder: Path

    @classmethod
    def install(cls, folder: Path, monkeypatch: Any) -> "Driver":
        """Let processes that are started from here find it."""
        support = Path(__file__).parent
        paths = [str(support / "driver"), str(support), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        monkeypatch.setenv("DRYFIT_TEST_DRIVER", str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def set(self, processes: Mapping[int, int | None]) -> None:
        """Let these processes, and no others, hold memory."""
        file = self.folder / "processes.json"
        new = file.with_suffix(".new")
        new.write_text(json.dumps(processes), encoding="ascii")
        new.replace(file)

    def mark(self, state: str) -> None:
        """Let it be so from now on: it ``hangs``, it ``dies``, a neighbour ``comes``."""
        (self.folder / state).touch()

    @property
    def comes(self) -> bool:
        """Whether a neighbour is to come."""
        return (self.folder / "comes").exists()

    @property
    def came(self) -> bool:
        """Whether somebody has held memory."""
        return (self.folder / "processes.json").exists()

    @property
    def looks(self) -> int:
        """How often it was asked for memory."""
        file = self.folder / "looks"
        return len(file.read_text().splitlines()) if file.exists() else 0
