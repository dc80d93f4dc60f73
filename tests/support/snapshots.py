"""The segments that a simulated allocator has reserved, and their blocks."""

from dataclasses import dataclass

from dryfit.gpu.allocator_settings import SMALL_SEGMENT_BYTES
from dryfit.gpu.caching_allocator import CachingAllocator

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
