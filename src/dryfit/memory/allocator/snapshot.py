"""Read files of ``torch.cuda.memory._dump_snapshot``, and compare the simulated allocator with them.

The format is written by ``_cuda_memorySnapshot`` of ``torch/csrc/cuda/Module.cpp`` and described in the docstring of
``torch.cuda.memory._snapshot``; ``torch/cuda/_memory_viz.py`` reads it too. Used here are:

* ``device_traces``: for each device a list of entries with ``action``, ``addr``, ``size``, ``stream`` and, in newer
  versions, ``pool_id``. ``size`` of ``alloc`` and ``free_*`` is what was asked for, before rounding.
* ``segments``: the state when the snapshot was taken, with ``address``, ``total_size``, ``stream``,
  ``segment_pool_id``, ``device`` and ``blocks``, each with ``address``, ``size``, ``requested_size``, ``state``.
* ``allocator_settings``: the text of the settings under ``PYTORCH_CUDA_ALLOC_CONF``.

A record must hold everything since the process began: :func:`read_snapshot` refuses one that begins later.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

from dryfit.core.errors import ConfigError
from dryfit.memory.allocator.caching_allocator import CachingAllocator
from dryfit.memory.allocator.settings import AllocatorSettings
from dryfit.memory.allocator.snapshot_file import Item, integer, items, load, pair, text

_NEXT = "record again with torch.cuda.memory._record_memory_history() from the start, without skip_actions"


class _Action(StrEnum):
    """An action of the allocator."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"


_TAKEN = (_Action.SEGMENT_ALLOC, _Action.SEGMENT_MAP)
_BLOCKS = (_Action.ALLOC, _Action.FREE_REQUESTED, _Action.FREE_COMPLETED)
_GIVEN = (_Action.SEGMENT_FREE, _Action.SEGMENT_UNMAP)


@dataclass(frozen=True, slots=True)
class _Entry:
    action: _Action
    address: int
    size: int
    note: str


@dataclass(frozen=True, slots=True)
class SnapshotTrace:
    """The events of one device's allocator on its busiest stream.

    Attributes:
        blocks: Number of the block of each event.
        deltas: Bytes asked for, unrounded, above 0; minus as much where the block came back.
        reserved_bytes: Reserved after each event.
        released: Events before which memory was given back to the driver.
        settings: Of the allocator that was recorded.
        notes: What the thread of each event had set with ``torch.cuda.memory._set_memory_metadata``.
    """

    blocks: Sequence[int]
    deltas: Sequence[int]
    reserved_bytes: Sequence[int]
    released: frozenset[int]
    settings: AllocatorSettings
    notes: Sequence[str]


def read_snapshot(path: Path, *, device: int = 0) -> SnapshotTrace:
    """Read a snapshot: the pickle that torch writes, or the same as JSON.

    Args:
        path: The file.
        device: Index of the device.

    Raises:
        ConfigError: It is no snapshot, has objects besides plain values, has no trace of the device, or lacks
            entries since the process began.
    """
    data = load(path)
    recorded, stream = _busiest(path, data, device)
    chosen = [item for item in recorded if _stream(path, item, "pool_id") == stream]
    entries = [entry for item in chosen if (entry := _entry(path, item)) is not None]
    segments = [item for item in items(path, data, "segments") if _belongs(path, item, device, stream)]
    trace, live = _followed(path, entries, _settings(path, data.get("allocator_settings")))
    reserved = sum(integer(path, segment, "total_size") for segment in segments)
    if live != _live_at_end(path, segments) or reserved != trace.reserved_bytes[-1]:
        problem = f"its entries end with {len(live)} blocks in {trace.reserved_bytes[-1]} bytes, its state is another"
        raise ConfigError(f"reading {path}", problem, "a record without gaps", _NEXT)
    return trace


def compare(trace: SnapshotTrace) -> int:
    """Simulate the recorded events; return the largest difference in bytes of reserved memory after one of them.

    Where the record says that memory was given back, all that can be is given back here: as ``empty_cache`` does,
    and the allocator itself where the device is full. Giving back a part, as with ``garbage_collection_threshold``
    and ``max_split_size_mb`` on a full device, shows as a difference.

    Args:
        trace: From :func:`read_snapshot`.
    """
    allocator = CachingAllocator(trace.settings)
    address_of: dict[int, int] = {}
    largest = 0
    for index, (block, delta) in enumerate(zip(trace.blocks, trace.deltas, strict=True)):
        if index in trace.released:
            allocator.release_cached()
        if delta > 0:
            address_of[block] = cast("int", allocator.malloc(delta))
        else:
            allocator.free(address_of.pop(block))
        largest = max(largest, abs(allocator.reserved_bytes - trace.reserved_bytes[index]))
    return largest


def _settings(path: Path, item: object) -> AllocatorSettings:
    """Return the allocator's settings; the kind of its segments may have been set after the text was read."""
    parsed = AllocatorSettings.parse(text(path, item, "PYTORCH_CUDA_ALLOC_CONF"))
    expandable = cast("Item", item).get("expandable_segments") if isinstance(item, dict) else None
    return replace(parsed, expandable_segments=expandable) if isinstance(expandable, bool) else parsed


def _stream(path: Path, item: Item, pool: str) -> tuple[int, int, int]:
    """Return stream and memory pool of an entry or a segment: each has blocks of its own."""
    return (integer(path, item, "stream"), *pair(path, item, pool))


def _busiest(path: Path, data: Item, device: int) -> tuple[list[Item], tuple[int, int, int]]:
    traces = data.get("device_traces")
    if not isinstance(traces, list) or not 0 <= device < len(cast("list[object]", traces)):
        raise ConfigError(f"reading {path}", f"no trace of device {device}", "", _NEXT)
    recorded = items(path, {"device_traces": cast("list[object]", traces)[device]}, "device_traces")
    count = Counter(_stream(path, item, "pool_id") for item in recorded if item.get("action") in _BLOCKS)
    if not count:
        raise ConfigError(f"reading {path}", f"nothing allocated or freed in the trace of device {device}", "", _NEXT)
    return recorded, count.most_common(1)[0][0]


def _belongs(path: Path, item: Item, device: int, stream: tuple[int, int, int]) -> bool:
    return integer(path, item, "device") == device and _stream(path, item, "segment_pool_id") == stream


def _entry(path: Path, item: Item) -> _Entry | None:
    """Read an entry; None for one that changes nothing: a snapshot was taken, or a request failed."""
    action = item.get("action")
    if action in ("snapshot", "oom"):
        return None
    if action not in tuple(_Action):
        raise ConfigError(f"reading {path}", f"the action {action!r}", ", ".join(_Action))
    note = str(item.get("user_metadata", ""))
    return _Entry(_Action(cast("str", action)), integer(path, item, "addr"), integer(path, item, "size"), note)


def _live_at_end(path: Path, segments: list[Item]) -> set[int]:
    return {
        integer(path, block, "address")
        for segment in segments
        for block in items(path, segment, "blocks")
        if block.get("state") != "inactive"
    }


def _followed(path: Path, entries: Sequence[_Entry], settings: AllocatorSettings) -> tuple[SnapshotTrace, set[int]]:
    """Return the events of a record that begins with nothing allocated, and the blocks in use at its end."""
    # A block comes back when its owner asks for it, or later, when other streams have completed.
    completed = any(entry.action is _Action.FREE_COMPLETED for entry in entries)
    freeing = _Action.FREE_COMPLETED if completed else _Action.FREE_REQUESTED
    number_at: dict[int, int] = {}
    blocks, deltas, reserved_bytes, notes = list[int](), list[int](), list[int](), list[str]()
    released: set[int] = set()
    reserved = count = 0
    for index, entry in enumerate(entries):
        if entry.action in _TAKEN:
            reserved += entry.size
        elif entry.action in _GIVEN:
            reserved -= entry.size
            released.add(len(blocks))
        elif entry.action in (_Action.ALLOC, freeing):
            is_new = entry.action is _Action.ALLOC
            if is_new == (entry.address in number_at):
                gap = f"entry {index} ({entry.action} of {entry.size} bytes) does not fit to what comes before it"
                raise ConfigError(f"reading {path}", gap, "a record without gaps", _NEXT)
            if is_new:
                number_at[entry.address] = count
                count += 1
            blocks.append(number_at[entry.address] if is_new else number_at.pop(entry.address))
            deltas.append(entry.size if is_new else -entry.size)
            reserved_bytes.append(reserved)
            notes.append(entry.note)
    return SnapshotTrace(blocks, deltas, reserved_bytes, frozenset(released), settings, notes), set(number_at)
