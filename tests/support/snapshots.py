"""Memory snapshots in the format of torch, made by running the simulated allocator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dryfit.memory.allocator.caching_allocator import CachingAllocator
from dryfit.memory.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings

BASE = 0x7F0000000000
_SMALL_BELOW = 1 << 56
"""Addresses of the expandable segment of small blocks."""


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block of a segment, in use or free."""

    address: int
    size_bytes: int
    is_allocated: bool


@dataclass(frozen=True, slots=True)
class SegmentState:
    """Memory of the driver in one piece: a native segment, or a mapped stretch of an expandable one."""

    address: int
    size_bytes: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockState, ...]


def segments_of(allocator: CachingAllocator) -> tuple[SegmentState, ...]:
    """The reserved segments of a simulated allocator and their blocks; by age, or by address where segments expand."""
    live: dict[int, int] = allocator._live  # pyright: ignore[reportPrivateUsage]
    free: dict[int, int] = allocator._free_size  # pyright: ignore[reportPrivateUsage]
    expands = allocator.settings.expandable_segments
    stretches: list[list[BlockState]] = []
    end = -1
    for address, size in sorted({**live, **free}.items()):
        if address != end:
            stretches.append([])
        stretches[-1].append(BlockState(address, size, address in live))
        end = address + size
    made: list[SegmentState] = []
    for blocks in stretches:
        start, size = blocks[0].address, sum(block.size_bytes for block in blocks)
        is_small = start < _SMALL_BELOW if expands else size == SMALL_SEGMENT_BYTES
        made.append(SegmentState(start, size, is_small, expands, tuple(blocks)))
    return tuple(made)


def snapshot_of(
    blocks: Sequence[int],
    deltas: Sequence[int],
    conf: str = "",
    *,
    capacity: int | None = None,
) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return after these events.

    Args:
        blocks: Block of each event.
        deltas: Bytes, below 0 where the block is freed.
        conf: Text of the allocator's settings.
        capacity: Of the device.
    """
    settings = AllocatorSettings.parse(conf)
    allocator = CachingAllocator(settings, capacity)
    trace: list[dict[str, Any]] = []
    address_of: dict[int, int] = {}
    requested: dict[int, int] = {}
    reserved: list[tuple[int, int]] = []
    for block, delta in zip(blocks, deltas, strict=True):
        if delta > 0:
            address = allocator.malloc(delta)
            assert address is not None
            reserved = _segment_entries(trace, allocator, reserved)
            address_of[block] = address
            requested[address] = delta
            trace.append(_entry("alloc", address, delta))
        else:
            address = address_of.pop(block)
            allocator.free(address)
            trace += [_entry(f"free_{what}", address, requested[address]) for what in ("requested", "completed")]
    trace.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []})
    return {
        "segments": [_segment(segment, requested) for segment in segments_of(allocator)],
        "device_traces": [trace, []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf, "expandable_segments": settings.expandable_segments},
        "external_annotations": [],
    }


def _entry(action: str, address: int, size: int) -> dict[str, Any]:
    entry = {"action": action, "addr": BASE + address, "size": size, "stream": 0, "time_us": 0, "frames": []}
    return {**entry, "pool_id": (0, 0), "compile_context": "N/A", "user_metadata": ""}


def _segment_entries(
    trace: list[dict[str, Any]], allocator: CachingAllocator, before: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Entries for the memory that came and went with a request; the ranges reserved now."""
    now = [(segment.address, segment.address + segment.size_bytes) for segment in segments_of(allocator)]
    expands = allocator.settings.expandable_segments
    for start, end in _without(before, now):
        trace.append(_entry("segment_unmap" if expands else "segment_free", start, end - start))
    for start, end in _without(now, before):
        trace.append(_entry("segment_map" if expands else "segment_alloc", start, end - start))
    return now


def _without(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is in the ranges but not in the others."""
    left = ranges
    for low, high in others:
        pieces = [part for start, end in left for part in ((start, min(end, low)), (max(start, high), end))]
        left = [(start, end) for start, end in pieces if start < end]
    return left


def _segment(segment: Any, requested: dict[int, int]) -> dict[str, Any]:
    used = sum(block.size_bytes for block in segment.blocks if block.is_allocated)
    return {
        "device": 0,
        "address": BASE + segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(requested[block.address] for block in segment.blocks if block.is_allocated),
        "stream": 0,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": BASE + block.address,
                "size": block.size_bytes,
                "requested_size": requested[block.address] if block.is_allocated else 0,
                "state": "active_allocated" if block.is_allocated else "inactive",
                "frames": [],
            }
            for block in segment.blocks
        ],
    }
