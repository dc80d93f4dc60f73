"""A run's memory as files that the viewers people know open: PyTorch's memory snapshot, and a Chrome trace.

A snapshot has the form that ``torch.cuda.memory._dump_snapshot`` pickles (torch 2.8 to 2.15), for
pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py``; a trace that of the Trace Event Format, for Perfetto and
``chrome://tracing``. A virtual GPU has no clock: both count events, one microsecond each.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dryfit.gpu.allocator_settings import SMALL_SEGMENT_BYTES, AllocatorSettings
from dryfit.gpu.caching_allocator import LARGE_RANGE
from dryfit.gpu.events import Label
from dryfit.gpu.script_recorder import LiveAllocations, Places
from dryfit.settings.memory_terms import MemoryCategory
from dryfit.settings.rehearsal_messages import OutOfMemory

_FIRST_ADDRESS = 0x7F00_0000_0000
_FIRST_LARGE_ADDRESS = 0x7E00_0000_0000
"""Of the expandable segment of large blocks; viewers in browsers take no number above 2**53."""
_TAKES = frozenset({"segment_alloc", "segment_map"})
_STEPS, _PHASES, _MODULES = range(1, 4)
"""Rows of a trace."""

Frames = list[dict[str, Any]]
Event = dict[str, Any]
Failure = tuple[int, int, OutOfMemory]
"""Number of events before an out-of-memory error, the bytes that were left, and the error."""


def memory_snapshot(
    run: LiveAllocations,
    places: Places,
    *,
    since: int | None = 0,
    until: int | None = None,
    most: int | None = None,
    failures: Sequence[Failure] = (),
) -> dict[str, Any]:
    """Return a memory snapshot: the segments as they are, and what has happened.

    Args:
        run: The device's allocations.
        places: Has the folder of the script.
        since: Number of events before those that are told; None: none is.
        until: Number of events after which the memory is told; None: all.
        most: Events that are told at most, the last ones.
        failures: The out-of-memory errors.
    """
    frames = [_frames(label, places) for label in run.label_table]
    last = len(run.blocks) if until is None else until
    told = [] if since is None else list(_history(run, frames, range(since, last), failures, places))
    return {
        "segments": _segments(run, frames, last),
        "device_traces": [told if most is None else told[max(0, len(told) - most) :]],
        "allocator_settings": _settings(run.allocator.settings),
        "external_annotations": [],
    }


def _frames(label: Label, places: Places) -> Frames:
    """Return the operator, the deepest line outside of torch and the script's own line, innermost first."""
    operator = {"filename": label.op, "line": 0, "name": label.module or str(label.phase)}
    return [operator, *_lines(label, places)]


def _lines(where: Label | OutOfMemory, places: Places) -> Frames:
    found: Frames = []
    for place in dict.fromkeys((where.source, where.line)):
        path, _, number = place.rpartition(":")
        if path:
            found.append({"filename": path, "line": int(number), "name": places.code_of(place) or str(where.phase)})
    return found


def _address(address: int) -> int:
    if address < LARGE_RANGE:
        return _FIRST_ADDRESS + address
    return _FIRST_LARGE_ADDRESS + address - LARGE_RANGE


def _segments(run: LiveAllocations, frames: Sequence[Frames], until: int) -> list[dict[str, Any]]:
    """Return the segments after a number of events; what lies between the blocks that are held is free."""
    held: dict[int, tuple[int, int, int]] = {}
    before = 0
    for at in range(until):
        address, delta = run.addresses[at], run.deltas[at]
        if delta > 0:
            held[address] = run.allocated[at] - before, delta, run.labels[at]
        else:
            held.pop(address, None)
        before = run.allocated[at]
    addresses = sorted(held)
    found: list[dict[str, Any]] = []
    for start, end in _mapped(run, until):
        blocks: list[dict[str, Any]] = []
        at = start
        for address in addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]:
            if at < address:
                blocks.append(_block(at, address - at))
            size, requested_bytes, label = held[address]
            blocks.append(_block(address, size, requested_bytes, frames[label]))
            at = address + size
        if at < end:
            blocks.append(_block(at, end - at))
        found.append(_segment(start, end - start, blocks, run.allocator.settings))
    return found


def _mapped(run: LiveAllocations, until: int) -> list[tuple[int, int]]:
    """Return where memory of the device lies after a number of events, in order; pages side by side are one."""
    borders: dict[int, int] = {}
    for at, action, start, size in run.segment_events:
        if at < until or until == len(run.blocks):
            sign = 1 if action in _TAKES else -1
            for border, change in ((start, sign), (start + size, -sign)):
                borders[border] = borders.get(border, 0) + change
    ends = sorted(border for border, change in borders.items() if change)
    return list(zip(ends[::2], ends[1::2], strict=True))


def _block(start: int, size: int, requested_bytes: int = 0, frames: Frames | None = None) -> dict[str, Any]:
    return {
        "address": _address(start),
        "size": size,
        "requested_size": requested_bytes,
        "state": "inactive" if frames is None else "active_allocated",
        "frames": frames or [],
    }


def _segment(start: int, size: int, blocks: list[dict[str, Any]], settings: AllocatorSettings) -> dict[str, Any]:
    active = sum(block["size"] for block in blocks if block["state"] != "inactive")
    is_small = start < LARGE_RANGE if settings.expandable_segments else size == SMALL_SEGMENT_BYTES
    return {
        "device": 0,
        "address": _address(start),
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": 0,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": settings.expandable_segments,
        "frames": [],
        "blocks": blocks,
    }


def _history(
    run: LiveAllocations, frames: Sequence[Frames], told: range, failures: Sequence[Failure], places: Places
) -> Iterator[Event]:
    """Yield what has happened from an event on, as torch tells it: a segment comes before its first block."""
    table = run.label_table
    metadata = [f"{label.phase}, {label.category}" for label in table]
    of_driver = iter([event for event in run.segment_events if event[0] >= told.start])
    of_errors = iter([failure for failure in failures if failure[0] >= told.start])
    segment, failure = next(of_driver, None), next(of_errors, None)
    last = told.stop
    for at in range(told.start, last + 1):
        label = run.labels[min(at, last - 1)] if last else None
        common = {
            "stream": 0,
            "time_us": at,
            "frames": frames[label] if label is not None else [],
            "compile_context": "N/A",
            "user_metadata": metadata[label] if label is not None else "",
        }
        while segment is not None and segment[0] == at and (at < last or last == len(run.blocks)):
            yield {"action": segment[1], "addr": _address(segment[2]), "size": segment[3], **common}
            segment = next(of_driver, None)
        while failure is not None and failure[0] == at:
            _, left_bytes, error = failure
            own = {"frames": _lines(error, places), "user_metadata": str(error.phase)}
            refused = {"addr": 0, "size": error.requested_bytes, "device_free": left_bytes}
            yield {**common, "action": "oom", **refused, **own}
            failure = next(of_errors, None)
        if at == last:
            return
        address, delta = _address(run.addresses[at]), run.deltas[at]
        for action in ("alloc",) if delta > 0 else ("free_requested", "free_completed"):
            yield {"action": action, "addr": address, "size": abs(delta), **common}


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    return {
        "expandable_segments": settings.expandable_segments,
        "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        "garbage_collection_threshold": settings.gc_threshold or 0.0,
        "roundup_power2_divisions": {
            str(1 << number): one for number, one in enumerate(settings.roundup_power2_divisions)
        },
    }


def chrome_trace(
    run: LiveAllocations,
    categories: Callable[[int, int], MemoryCategory],
    steps: Mapping[int, int],
    *,
    until: int | None = None,
) -> dict[str, Any]:
    """Return a trace: steps, phases and modules as slices, and memory as counters.

    Args:
        run: The device's allocations.
        categories: Of a label's number and a block.
        steps: The number of events at the end of each step, by its number.
        until: Number of events that are told; None: all.
    """
    events: list[Event] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "virtual GPU"}},
        *(
            {"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in ((_STEPS, "steps"), (_PHASES, "phases"), (_MODULES, "modules"))
        ),
    ]
    begin = 0
    for number, end in steps.items():
        events.append(_slice(f"step {number}", _STEPS, begin, end))
        begin = end
    last = len(run.blocks) if until is None else until
    labels = run.label_table
    table = [labels[number] for number in run.labels[:last]]
    events += _runs([str(label.phase) for label in table], _PHASES)
    events += _runs([label.module for label in table], _MODULES)
    sizes = dict.fromkeys((str(one) for one in MemoryCategory), 0)
    held: dict[int, tuple[str, int]] = {}
    before = 0
    for at in range(last):
        block, number, allocated = run.blocks[at], run.labels[at], run.allocated[at]
        if run.deltas[at] > 0:
            held[block] = str(categories(number, block)), allocated - before
        category, size = held[block] if run.deltas[at] > 0 else held.pop(block)
        sizes[category] += allocated - before if run.deltas[at] > 0 else -size
        before = allocated
        total = {"allocated": allocated, "cached": run.reserved[at] - allocated}
        events.append({"ph": "C", "pid": 1, "ts": at, "name": "memory", "args": total})
        events.append({"ph": "C", "pid": 1, "ts": at, "name": category, "args": {"bytes": sizes[category]}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(name: str, row: int, begin: int, end: int) -> Event:
    return {"ph": "X", "pid": 1, "tid": row, "name": name, "ts": begin, "dur": end - begin}


def _runs(names: Sequence[str], row: int) -> Iterator[Event]:
    """Yield a slice for each run of equal names; an empty one is none."""
    begin = 0
    for at in range(1, len(names) + 1):
        if at == len(names) or names[at] != names[begin]:
            if names[begin]:
                yield _slice(names[begin], row, begin, at)
            begin = at
