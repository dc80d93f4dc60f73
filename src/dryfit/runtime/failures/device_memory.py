"""The memory of a device when an allocation failed, from torch's error message and from measurements."""

import re
from dataclasses import dataclass

from dryfit.core.failure import ChildFault, Evidence
from dryfit.core.text.units import gib, parse_bytes

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
