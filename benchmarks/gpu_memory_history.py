"""A device's record of its allocations beside those planned: replayed, by phase, and one by one.

Read are files of ``torch.cuda.memory._dump_snapshot``. The format is written by ``_cuda_memorySnapshot`` of
``torch/csrc/cuda/Module.cpp`` and described in the docstring of ``torch.cuda.memory._snapshot``;
``torch/cuda/_memory_viz.py`` reads it too. Used here are:

* ``device_traces``: for each device a list of entries with ``action``, ``addr``, ``size``, ``stream`` and, in newer
  versions, ``pool_id``. ``size`` of ``alloc`` and ``free_*`` is what was asked for, before rounding.
* ``segments``: the state when the snapshot was taken, with ``address``, ``total_size``, ``stream``,
  ``segment_pool_id``, ``device`` and ``blocks``, each with ``address``, ``size``, ``requested_size``, ``state``.
* ``allocator_settings``: the text of the settings under ``PYTORCH_CUDA_ALLOC_CONF``.

A record must hold everything since the process began: :func:`read_snapshot` refuses one that begins later.

Of frees only the replay takes note: a free lies where the last reference ends, and peaks show where that is wrong.
"""

import io
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, cast

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import CachingAllocator
from dryfit.gpu.events import BLOCK_BYTES
from dryfit.plans.timeline import Timeline
from dryfit.settings.errors import ConfigError, InternalError
from dryfit.settings.memory_terms import StepPhase

Item: TypeAlias = dict[str, object]

# A damaged pickle raises nearly anything; this is what its opcodes and the reader of JSON raise without running code.
_DAMAGED = (
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle containers, strings and numbers only; any class or function in the file is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def load(path: Path) -> Item:
    """Return the dictionary in a file, pickled by torch or written as JSON.

    Raises:
        ConfigError: The file cannot be read, or is neither, or asks for more than plain values.
    """
    doing = f"reading {path}"
    allowed = "a file of torch.cuda.memory._dump_snapshot, or the same as JSON"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(doing, str(error), allowed) from error
    try:
        is_json = content.lstrip()[:1] == b"{"
        data: object = json.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()
    except _DAMAGED as error:
        raise ConfigError(doing, f"no plain values: {error}", allowed) from error
    if not isinstance(data, dict):
        raise ConfigError(doing, f"a {type(data).__name__}", allowed)
    return cast("Item", data)


def items(path: Path, item: Item, key: str) -> list[Item]:
    """Return a value that must be a list of dictionaries."""
    value = item.get(key)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in cast("list[object]", value)):
        raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "a list of dictionaries")
    return cast("list[Item]", value)


def integer(path: Path, item: Item, key: str) -> int:
    """Return a value that must be a whole number from 0 on."""
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "a whole number from 0 on")
    return value


def pair(path: Path, item: Item, key: str) -> tuple[int, int]:
    """Return the name of a memory pool; that of the common pool where there is none, as in files of older versions."""
    value = item.get(key, (0, 0))
    if isinstance(value, list | tuple):
        parts = cast("list[object] | tuple[object, ...]", value)
        if len(parts) == 2:
            return integer(path, {key: parts[0]}, key), integer(path, {key: parts[1]}, key)
    raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "two whole numbers")


def text(path: Path, item: object, key: str) -> str:
    """Return a string; empty where there is none, as in files of older versions."""
    value = cast("Item", item).get(key, "") if isinstance(item, dict) else ""
    if not isinstance(value, str):
        raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "a string")
    return value


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}: {value!r:.60}"


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


ALIGNED_BYTES = 64 * 1024
"""Smaller allocations are not compared in order: real code makes single numbers here and there."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An allocation.

    Attributes:
        size_bytes: Rounded up to whole blocks.
        by: Module and operator; empty where that is not known.
    """

    phase: StepPhase
    size_bytes: int
    by: str = ""


@dataclass(frozen=True, slots=True)
class Deviation:
    """The first allocation in which trace and device differ; sizes are None where one of them has no more.

    Attributes:
        index: Its index among the allocations compared.
        planned_by: Module and operator in the trace.
    """

    index: int
    phase: StepPhase
    planned_bytes: int | None
    planned_by: str
    observed_bytes: int | None


@dataclass(frozen=True, slots=True)
class PhaseDifference:
    """Differences between the allocations of one phase, regardless of their order.

    Attributes:
        matched: Number of allocations that both have.
        only_planned_bytes: Sum of those that only the trace has.
        only_observed_bytes: Sum of those that only the device has.
        largest_planned_bytes: The largest that only the trace has; 0: none.
        largest_observed_bytes: The largest that only the device has; 0: none.
    """

    phase: StepPhase
    matched: int
    only_planned_bytes: int
    only_observed_bytes: int
    largest_planned_bytes: int
    largest_observed_bytes: int


def by_operator(run: Timeline, history: SnapshotTrace) -> dict[str, Any]:
    """Compare a run as planned with the record of the device's allocator, as values of JSON.

    Args:
        run: The run that a plan was made from.
        history: Of the same case; ``replay_difference_bytes`` is what :func:`compare` returns of it.
    """
    planned, observed = planned_allocations(run), observed_allocations(history)
    first = first_deviation(planned, observed)
    return {
        "phases": [asdict(one) for one in phase_differences(planned, observed)],
        "first_deviation": asdict(first) if first else None,
        "replay_difference_bytes": compare(history),
        "replayed_events": len(history.blocks),
    }


def planned_allocations(run: Timeline) -> list[Taken]:
    """List the allocations of a traced run, in order."""
    labels = [run.label_table[label] for label in run.labels.tolist()]
    return [
        Taken(label.phase, size, f"{label.module} {label.op}".strip())
        for label, size in zip(labels, run.rounded.tolist(), strict=True)
        if size > 0
    ]


def observed_allocations(trace: SnapshotTrace) -> list[Taken]:
    """List the allocations that a device's allocator recorded, in order.

    The main thread notes its phase in the allocator's metadata. They belong to a thread, so allocations without a
    phase are those of autograd's backward thread.

    Raises:
        InternalError: The metadata is no phase.
    """
    allocations: list[Taken] = []
    for index, note in enumerate(trace.notes):
        if note and note not in tuple(StepPhase):
            raise InternalError("reading an allocator's history", f"event {index} is of the phase {note!r}")
        if trace.deltas[index] > 0:
            allocations.append(Taken(StepPhase(note or StepPhase.BACKWARD), _whole_blocks(trace.deltas[index])))
    return allocations


def phase_differences(planned: Sequence[Taken], observed: Sequence[Taken]) -> tuple[PhaseDifference, ...]:
    """Compare the allocations of each phase as multisets of sizes."""
    differences: list[PhaseDifference] = []
    for phase in StepPhase:
        mine = Counter(allocation.size_bytes for allocation in planned if allocation.phase is phase)
        theirs = Counter(allocation.size_bytes for allocation in observed if allocation.phase is phase)
        if not mine and not theirs:
            continue
        only_planned, only_observed = mine - theirs, theirs - mine
        differences.append(
            PhaseDifference(
                phase=phase,
                matched=(mine & theirs).total(),
                only_planned_bytes=sum(size * count for size, count in only_planned.items()),
                only_observed_bytes=sum(size * count for size, count in only_observed.items()),
                largest_planned_bytes=max(only_planned, default=0),
                largest_observed_bytes=max(only_observed, default=0),
            )
        )
    return tuple(differences)


def first_deviation(planned: Sequence[Taken], observed: Sequence[Taken]) -> Deviation | None:
    """Find the first place at which two orders of allocations differ in size; None where they are the same.

    Args:
        planned: As traced.
        observed: As recorded.
    """
    mine = [one for one in planned if one.size_bytes >= ALIGNED_BYTES]
    theirs = [one for one in observed if one.size_bytes >= ALIGNED_BYTES]
    for index in range(max(len(mine), len(theirs))):
        one = mine[index] if index < len(mine) else None
        other = theirs[index] if index < len(theirs) else None
        if one is None or other is None or one.size_bytes != other.size_bytes:
            return Deviation(
                index=index,
                phase=(one or theirs[index]).phase,
                planned_bytes=one.size_bytes if one else None,
                planned_by=one.by if one else "",
                observed_bytes=other.size_bytes if other else None,
            )
    return None


def _whole_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
