"""Evidence around the end of a child: its device, host memory, thread stacks and the disk."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from dryfit.processes.gpus import GpuMonitor, GpuState
from dryfit.processes.helpers import session_members
from dryfit.settings.devices import place_of
from dryfit.settings.errors import ChildFault, Evidence, FileError
from dryfit.settings.files import appending, reading
from dryfit.settings.text import gib, parse_bytes

# The memory of a device when an allocation failed, from torch's error message and from measurements.


_SIZE = r"(\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB))"
# torch c10/cuda/CUDACachingAllocator.cpp, since 2.1; the processes are NVML's, and left out where it is not there.
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_CACHED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")

_UNEXPLAINED_BYTES = 1 << 30
"""Memory that no known process holds, such as our own context; more than this is another program's."""

_NEIGHBOURS_SHARE = 4
"""Without a plan, other programs are blamed if they hold at least a quarter of the device."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device at a failed allocation; None where unknown."""

    asked_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None
    planned_bytes: int | None = None


def _amount(match: re.Match[str] | None, group: int = 1) -> int | None:
    if match is None:
        return None
    number, _, unit = match[group].partition(" ")
    if float(number) == 0:
        return 0
    return parse_bytes(f"{number} {'B' if unit == 'bytes' else unit}")


def _most(*amounts: int | None) -> int | None:
    return max((amount for amount in amounts if amount is not None), default=None)


def parse_oom_message(text: str) -> DeviceMemory:
    """Parse torch's message on a failed allocation; of any other text, all is unknown."""
    if "Tried to allocate" not in text:
        return DeviceMemory()
    total = _TOTAL.search(text)
    total_bytes, free_bytes = _amount(total), _amount(total, 2)
    allocated, cached = _amount(_ALLOCATED.search(text)), _amount(_CACHED.search(text))
    reserved = (allocated or 0) + (cached or 0) if allocated is not None else None
    own_bytes = _amount(_OWN.search(text))
    others = sorted(_amount(match) or 0 for match in _PROCESS.finditer(text))
    if own_bytes is None and reserved is not None:
        # In a container, NVML's process ids are not ours: one of the other processes is this one.
        own_bytes = next((size for size in others if size >= reserved), None)
        if own_bytes is not None:
            others.remove(own_bytes)
        own_bytes = own_bytes if own_bytes is not None else reserved
    others_bytes = sum(others) if others or _OWN.search(text) else None
    if total_bytes is not None and free_bytes is not None and own_bytes is not None:
        unexplained = total_bytes - free_bytes - own_bytes - _UNEXPLAINED_BYTES
        others_bytes = max(others_bytes or 0, unexplained, 0)
    return DeviceMemory(_amount(_ASKED.search(text)), total_bytes, free_bytes, own_bytes, others_bytes)


def known_device_memory(evidence: Evidence, fault: ChildFault | None) -> DeviceMemory:
    """Return all that is known: torch's message first, then the measurements around the end."""
    message = parse_oom_message(fault.message if fault is not None else evidence.log_tail)
    return DeviceMemory(
        asked_bytes=message.asked_bytes,
        total_bytes=message.total_bytes if message.total_bytes is not None else evidence.device_total_bytes,
        free_bytes=message.free_bytes if message.free_bytes is not None else evidence.device_free_bytes,
        own_bytes=_most(message.own_bytes, evidence.peak_bytes),
        others_bytes=_most(message.others_bytes, evidence.neighbour_bytes),
        planned_bytes=evidence.planned_bytes,
    )


def held_by_neighbours(memory: DeviceMemory) -> bool:
    """Whether other programs held the memory that the trial needed.

    With a plan: the trial took no more than planned, and the others left less than that. Without a plan: the others
    held a good part of the device, into which the failed allocation would have fitted.
    """
    total, others = memory.total_bytes, memory.others_bytes
    if total is None or not others:
        return False
    planned = memory.planned_bytes
    if planned is not None:
        return (memory.own_bytes or 0) <= planned <= total and total - others < planned
    return others >= (memory.asked_bytes or 0) and others * _NEIGHBOURS_SHARE >= total


def memory_text(memory: DeviceMemory) -> str:
    """Format the known numbers for a sentence; empty if none is known."""
    parts = [
        ("planned", memory.planned_bytes),
        ("taken", memory.own_bytes),
        ("asked for", memory.asked_bytes),
        ("free", memory.free_bytes),
        ("held by others", memory.others_bytes),
        ("of", memory.total_bytes),
    ]
    return ", ".join(f"{name} {gib(size_bytes)}" for name, size_bytes in parts if size_bytes is not None)


# Dumps the thread stacks of a silent child and of the processes it started, before they are killed.
#
# Every child registers ``faulthandler`` for SIGUSR1, and its forked workers inherit that. The handler is native code,
# so it runs whatever Python waits for: a lock, a kernel, a system call.


_ANSWER_S = 0.5
_SETTLED_S = 0.05
_ALL_S = 3.0
_POLL_S = 0.01
_MOST_LINES = 12
_FRAMES = 2
_READ_BYTES = 256 << 10

_FILE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_HEADING = "--- process "


def dump_stacks(path: Path, leader_pid: int, marker: str) -> str:
    """Have every process of a child's session write its stacks, one after another.

    A stopped process cannot answer; its state is in its heading. A process without the handler is ended by the signal,
    a moment before it would be killed anyway.

    Args:
        path: The file that they write to.
        leader_pid: The child.
        marker: The study's, which all of them carry.

    Returns:
        The innermost frames of each thread, a line a thread.
    """
    begun = _size(path)
    deadline_s = time.monotonic() + _ALL_S
    # The child comes last, whatever time the others took: the place of a failure is read from the last dump.
    for pid in sorted(session_members(leader_pid, marker), key=lambda pid: (pid == leader_pid, pid)):
        if time.monotonic() > deadline_s and pid != leader_pid:
            continue
        with suppress(OSError), appending(path) as file:
            file.write(f"\n{_HEADING}{pid}, {_state(pid)}\n".encode())
        before = _size(path)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
            _wait_for_more(path, before, time.monotonic() + _ANSWER_S)
    try:
        with reading(path) as file:
            file.seek(begun)
            text = file.read(_READ_BYTES).decode(errors="replace")
    except (OSError, FileError):
        return ""
    return innermost_frames(text, leader_pid)


def innermost_frames(text: str, leader_pid: int = 0) -> str:
    """Return the innermost frames of each thread in ``faulthandler``'s output, a line a thread, at most a dozen.

    Args:
        text: The output, with headings.
        leader_pid: The process whose threads come first.
    """
    lines = sorted(_lines(text), key=lambda line: not line.startswith(f"process {leader_pid},"))
    more = len(lines) - _MOST_LINES
    return "\n".join(lines[:_MOST_LINES] + ([f"and {more} more threads"] if more > 0 else []))


def _lines(text: str) -> Iterator[str]:
    process, frames, silent = "", list[str](), False
    for line in [*text.splitlines(), _HEADING]:
        frame = _FILE.match(line)
        heading = line.startswith(_HEADING)
        if heading or _THREAD.match(line):
            if frames or (heading and silent):
                yield f"{process}: " + (" < ".join(frames) or "gave no stack")
            frames, silent = [], heading and line != _HEADING
            process = line.removeprefix("--- ") if heading else process
        elif frame is not None and len(frames) < _FRAMES:
            frames.append(f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})")


def _state(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.name()}, {process.status()}"
    except psutil.Error:
        return "gone"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_for_more(path: Path, before: int, deadline_s: float) -> None:
    """Wait until a file has grown and does not grow any more."""
    last, since_s = before, time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        size = _size(path)
        if size != last:
            last, since_s = size, now_s
        elif size > before and now_s - since_s > _SETTLED_S:
            return
        time.sleep(_POLL_S)


# Collects evidence around the end of a child: the state of its device, shared memory and the disk.


SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class _Placed:
    device: str
    planned_bytes: int | None
    xids_before: int


@dataclass(slots=True)
class EvidenceCollector:
    """Adds the state of the machine to the evidence of a child's end; the supervisor calls :meth:`probe`.

    Attributes:
        devices: Reports the state of GPUs.
        folder: The study's folder.
        shared_memory: The mount point of shared memory.
    """

    devices: GpuMonitor
    folder: Path
    shared_memory: Path = SHARED_MEMORY
    _placed: dict[str, list[_Placed]] = field(default_factory=dict[str, list[_Placed]])

    def placed(self, key: str, device: str, planned_bytes: int | None) -> None:
        """Remember a device that a child is about to run on, and its planned memory there; once for each rank."""
        before = len(self.devices.xids(device))
        self._placed.setdefault(key, []).append(_Placed(device, planned_bytes, before))

    def probe(self, key: str, evidence: Evidence) -> Evidence:
        """Return the evidence of a child's end with the present state of its surroundings added."""
        evidence = replace(
            evidence,
            shm_free_bytes=_free_bytes(self.shared_memory),
            disk_free_bytes=_free_bytes(self.folder),
        )
        placed = self._placed.pop(key, None)
        if placed is None:
            return evidence
        xids = [(xid, rank.device) for rank in placed for xid in self.devices.xids(rank.device)[rank.xids_before :]]
        evidence = replace(
            evidence,
            device=place_of([rank.device for rank in placed]),
            planned_bytes=placed[0].planned_bytes,
            xids=tuple(xid for xid, _ in xids),
            xid_devices=tuple(device for _, device in xids),
        )
        looks = [(rank.device, self.devices.look(rank.device)) for rank in placed]
        states = [(state, self._neighbour_bytes(device, state)) for device, state in looks if state is not None]
        if not states:
            return evidence
        tightest, neighbour_bytes = min(states, key=lambda pair: pair[0].total_bytes - pair[1])
        return replace(
            evidence,
            device_free_bytes=tightest.free_bytes,
            device_total_bytes=tightest.total_bytes,
            neighbour_bytes=neighbour_bytes,
        )

    def _neighbour_bytes(self, device: str, state: GpuState) -> int:
        beside = [rank for placed in self._placed.values() for rank in placed if rank.device == device]
        return state.neighbour_bytes(sum(rank.planned_bytes or 0 for rank in beside), ours=bool(beside))


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
