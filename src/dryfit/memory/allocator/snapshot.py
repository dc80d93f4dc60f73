"""Read files of ``torch.cuda.memory._dump_snapshot``, and compare the simulated allocator with them.

The format is written by ``_cuda_memorySnapshot`` of ``torch/csrc/cuda/Module.cpp`` and described in the docstring of
``torch.cuda.memory._snapshot``; ``torch/cuda/_memory_viz.py`` reads it too. Used here are:

* ``device_traces``: for each device a list of entries with ``action``, ``addr``, ``size``, ``stream`` and, in newer
  versions, ``pool_id``. ``size`` of ``alloc`` and ``free_*`` is what was asked for, before rounding.
* ``segments``: the state when the snapshot was taken, with ``address``, ``total_size``, ``stream``,
  ``segment_pool_id``, ``device`` and ``blocks``, each with ``address``, ``size``, ``requested_size``, ``state``.
* ``allocator_settings``: the text of the settings under ``PYTORCH_CUDA_ALLOC_CONF``.

The record keeps the latest entries only. The state before the first of them is restored by undoing the
entries, from the last to the first, on the state at the end.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

from dryfit.core.errors import ConfigError
from dryfit.memory.allocator.caching_allocator import BlockState, CachingAllocator, SegmentState
from dryfit.memory.allocator.settings import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings
from dryfit.memory.allocator.snapshot_file import Item, integer, items, load, pair, text

_NEXT = "record again with torch.cuda.memory._record_memory_history(), without skip_actions"


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
class _Live:
    """A block in use; its size is known only where it is still in use at the end."""

    requested: int
    size: int | None


@dataclass(frozen=True, slots=True)
class SnapshotTrace:
    """The events of one device's allocator on its busiest stream.

    Attributes:
        blocks: Number of the block of each event.
        deltas: Bytes asked for, unrounded, above 0; minus as much where the block came back.
        reserved_bytes: Reserved after each event.
        released: Events before which memory was given back to the driver.
        first_event: The events before it were not recorded: they stand for the blocks in use when the record began.
        initial: The segments when the record began, by address.
        initial_addresses: Addresses of the blocks of the events before ``first_event``.
        final_active_bytes: In use when the snapshot was taken, in whole blocks.
        settings: Of the allocator that was recorded.
        skipped_events: Entries of other streams and of private pools, which are not in the columns.
        notes: What the thread of each event had set with ``torch.cuda.memory._set_memory_metadata``; empty for the
            events before ``first_event``.
    """

    blocks: Sequence[int]
    deltas: Sequence[int]
    reserved_bytes: Sequence[int]
    released: frozenset[int]
    first_event: int
    initial: tuple[SegmentState, ...]
    initial_addresses: tuple[int, ...]
    final_active_bytes: int
    settings: AllocatorSettings
    skipped_events: int
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class SnapshotComparison:
    """Differences between the simulated and the recorded allocator.

    Attributes:
        events: Events compared.
        first_difference: The first event after which other memory was reserved; None where none was.
        max_reserved_difference_bytes: The largest difference in reserved memory after an event, without its sign.
        active_difference_bytes: Simulated minus recorded memory in blocks at the end. Earlier sizes of
            blocks are not recorded.
    """

    events: int
    first_difference: int | None
    max_reserved_difference_bytes: int
    active_difference_bytes: int


def read_snapshot(path: Path, *, device: int = 0) -> SnapshotTrace:
    """Read a snapshot: the pickle that torch writes, or the same as JSON.

    Args:
        path: The file.
        device: Index of the device.

    Raises:
        ConfigError: It is no snapshot, has objects besides plain values, has no trace of the device, or lacks
            entries between those it has.
    """
    data = load(path)
    recorded, stream = _busiest(path, data, device)
    chosen = [item for item in recorded if _stream(path, item, "pool_id") == stream]
    entries = [entry for item in chosen if (entry := _entry(path, item)) is not None]
    segments = [item for item in items(path, data, "segments") if _belongs(path, item, device, stream)]
    settings = _settings(path, data.get("allocator_settings"))
    pieces = {integer(path, item, "address"): integer(path, item, "total_size") for item in segments}
    live = _live_at_end(path, segments)
    final_active = sum(block.size or 0 for block in live.values())
    _rewind(path, entries, pieces, live, settings.expandable_segments)
    initial = tuple(_segment(start, size, live, entries, settings) for start, size in sorted(pieces.items()))
    columns = _columns(entries, live, sum(pieces.values()))
    return SnapshotTrace(
        blocks=columns.blocks,
        deltas=columns.deltas,
        reserved_bytes=columns.reserved,
        released=frozenset(columns.released),
        first_event=len(live),
        initial=initial,
        initial_addresses=tuple(live),
        final_active_bytes=final_active,
        settings=settings,
        skipped_events=len(recorded) - len(chosen),
        notes=columns.notes,
    )


def compare(trace: SnapshotTrace, settings: AllocatorSettings) -> SnapshotComparison:
    """Simulate the recorded events and compare reserved memory after each of them.

    Where the record says that memory was given back, all that can be is given back here: as ``empty_cache`` does,
    and the allocator itself where the device is full. Giving back a part, as with ``garbage_collection_threshold``
    and ``max_split_size_mb`` on a full device, shows as a difference.

    Args:
        trace: From :func:`read_snapshot`.
        settings: To simulate with, normally ``trace.settings``.

    Raises:
        ConfigError: The record began with segments of the other kind than the settings ask for.
    """
    if any(segment.is_expandable != settings.expandable_segments for segment in trace.initial):
        raise ConfigError(
            "comparing with a snapshot",
            f"settings with expandable_segments:{settings.expandable_segments}",
            f"the kind of segments it began with: expandable_segments:{not settings.expandable_segments}",
        )
    allocator = CachingAllocator(settings)
    moved = allocator.restore(trace.initial)
    address_of = {number: moved[address] for number, address in enumerate(trace.initial_addresses)}
    first: int | None = None
    largest = 0
    for index in range(trace.first_event, len(trace.blocks)):
        if index in trace.released:
            allocator.release_cached()
        block, delta = trace.blocks[index], trace.deltas[index]
        if delta > 0:
            address_of[block] = cast("int", allocator.malloc(delta))
        else:
            allocator.free(address_of.pop(block))
        difference = abs(allocator.reserved_bytes - trace.reserved_bytes[index])
        largest = max(largest, difference)
        if difference and first is None:
            first = index
    return SnapshotComparison(
        events=len(trace.blocks) - trace.first_event,
        first_difference=first,
        max_reserved_difference_bytes=largest,
        active_difference_bytes=allocator.allocated_bytes - trace.final_active_bytes,
    )


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


def _live_at_end(path: Path, segments: list[Item]) -> dict[int, _Live]:
    return {
        integer(path, block, "address"): _Live(integer(path, block, "requested_size"), integer(path, block, "size"))
        for segment in segments
        for block in items(path, segment, "blocks")
        if block.get("state") != "inactive"
    }


def _freeing(entries: Sequence[_Entry]) -> _Action:
    """Return the action that frees a block: a request may wait for other streams to complete."""
    completed = any(entry.action == _Action.FREE_COMPLETED for entry in entries)
    return _Action.FREE_COMPLETED if completed else _Action.FREE_REQUESTED


def _rewind(path: Path, entries: Sequence[_Entry], pieces: dict[int, int], live: dict[int, _Live], joins: bool) -> None:
    """Undo the entries, so that the segments and blocks at the end become those at the beginning."""
    freeing = _freeing(entries)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry.action in _TAKEN:
            known = _remove(pieces, entry.address, entry.size)
        elif entry.action in _GIVEN:
            known = True
            _add(pieces, entry.address, entry.size, joins)
        elif entry.action == _Action.ALLOC:
            known = live.pop(entry.address, None) is not None
        else:
            known = entry.action != freeing or entry.address not in live
            if entry.action == freeing:
                live[entry.address] = _Live(entry.size, None)
        if not known:
            gap = f"entry {index} ({entry.action} of {entry.size} bytes) does not fit to what comes after it"
            raise ConfigError(f"reading {path}", gap, "a record without gaps", _NEXT)


def _add(pieces: dict[int, int], start: int, size: int, joins: bool) -> None:
    """Add a piece of memory; pieces of an expandable segment that touch become one."""
    if joins:
        size += pieces.pop(start + size, 0)
        before = next((at for at, length in pieces.items() if at + length == start), start)
        size += pieces.pop(before, 0)
        start = before
    pieces[start] = size


def _remove(pieces: dict[int, int], start: int, size: int) -> bool:
    """Take a stretch out of the piece it lies in; return whether there is one."""
    around = next((at for at, length in pieces.items() if at <= start and start + size <= at + length), None)
    if around is None:
        return False
    end = around + pieces.pop(around)
    if around < start:
        pieces[around] = start - around
    if start + size < end:
        pieces[start + size] = end - start - size
    return True


def _segment(
    start: int, size: int, live: dict[int, _Live], entries: Sequence[_Entry], settings: AllocatorSettings
) -> SegmentState:
    """Return a segment as it was when the record began, with its blocks in use and the free ones between."""
    end = start + size
    inside = sorted(address for address in live if start <= address < end)
    is_small = size == SMALL_SEGMENT_BYTES
    if settings.expandable_segments:
        # Pages of both pools look alike: the size of any block put there tells them apart.
        wanted = [live[address].requested for address in inside[:1]]
        wanted += [e.size for e in entries if e.action == _Action.ALLOC and start <= e.address < end][:1]
        is_small = bool(wanted) and wanted[0] <= SMALL_BYTES
    blocks: list[BlockState] = []
    at = start
    for address, limit in zip(inside, [*inside, end][1:], strict=True):
        if at < address:
            blocks.append(BlockState(at, address - at, is_allocated=False))
        taken = live[address].size or settings.round_request(live[address].requested)
        if not is_small and not settings.expandable_segments:
            is_uncut = settings.max_split_bytes is not None and taken >= settings.max_split_bytes
            if is_uncut or limit - address - taken <= SMALL_BYTES:
                # Native segments of the large pool leave no free block this small: it belongs to the one before.
                taken = limit - address
        blocks.append(BlockState(address, taken, is_allocated=True))
        at = address + taken
    if at < end:
        blocks.append(BlockState(at, end - at, is_allocated=False))
    return SegmentState(start, size, is_small, settings.expandable_segments, tuple(blocks))


@dataclass(slots=True)
class _Columns:
    """Events with the memory reserved after each, and those before which memory was given back."""

    blocks: list[int]
    deltas: list[int]
    reserved: list[int]
    notes: list[str]
    released: set[int]

    def add(self, block: int, delta: int, reserved: int, note: str) -> None:
        self.blocks.append(block)
        self.deltas.append(delta)
        self.reserved.append(reserved)
        self.notes.append(note)


def _columns(entries: Sequence[_Entry], live: dict[int, _Live], reserved: int) -> _Columns:
    freeing = _freeing(entries)
    number_at = {address: number for number, address in enumerate(live)}
    columns = _Columns([], [], [], [], set())
    for number, block in enumerate(live.values()):
        columns.add(number, block.requested, reserved, "")
    count = len(live)
    for entry in entries:
        if entry.action in _TAKEN:
            reserved += entry.size
        elif entry.action in _GIVEN:
            reserved -= entry.size
            columns.released.add(len(columns.blocks))
        elif entry.action == _Action.ALLOC:
            number_at[entry.address] = count
            columns.add(count, entry.size, reserved, entry.note)
            count += 1
        elif entry.action == freeing:
            columns.add(number_at.pop(entry.address), -entry.size, reserved, entry.note)
    return columns
