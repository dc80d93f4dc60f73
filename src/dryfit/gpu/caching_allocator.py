"""PyTorch's CUDA caching allocator, simulated, and the replay of recorded allocations through it."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from dryfit.gpu.allocator_settings import MIB, MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings
from dryfit.settings.errors import InternalError

# Simulate PyTorch's CUDA caching allocator: the same blocks in the same places, without a device.
#
# It follows ``DeviceCachingAllocator`` of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11 to 2.13) for one device,
# one stream and no CUDA graphs; the functions named in the docstrings are found there. What differs, and why:
#
# * A segment's address is above those of all earlier segments. Torch orders free blocks of one size by the age of
#   their segment, then by address, which is the same.
# * An expandable segment's range of addresses has no end. Torch reserves 9/8 of the device's memory per pool and
#   begins another segment only where that is used up, by holes that stay unmapped.
# * The capacity bounds the memory that is mapped, as the device does, and also the check that torch makes before
#   it takes a segment where the process may only have a fraction of the device. For native segments both are the
#   same; for expandable ones either alone would let through up to a page more.


_SHIFT = 60
"""A free block is kept as ``size << _SHIFT | address``: integers sort by size, then by address, and compare fast."""
_MASK = (1 << _SHIFT) - 1
LARGE_RANGE = 1 << 56
"""Where the expandable segment of large blocks begins; that of small blocks begins at 0."""
_ENDLESS = 1 << 55
_UNLIMITED = 1 << 62


class CachingAllocator:
    """Hands out blocks from segments it takes from the driver and keeps.

    Args:
        settings: See :class:`AllocatorSettings`.
        capacity_bytes: Memory it may take from the driver; None for as much as is asked.

    Attributes:
        reserved_bytes: Taken from the driver.
        allocated_bytes: In blocks handed out, each as large as it was cut.
        retries: How often all cached memory was given back to go on (``num_alloc_retries``).
        fragmented_bytes: Most memory that was reserved but not allocated when no cached block served a request.
        missing_bytes: The capacity that the latest request to the driver beyond the capacity asked for.
        asked_bytes: The largest capacity that a request within the capacity asked for.
        on_segment: Called with an action of torch's memory snapshots (``segment_alloc``, ``segment_free``,
            ``segment_map``, ``segment_unmap``), the address and the bytes; None: nobody listens.
    """

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None = None) -> None:
        self.on_segment: Callable[[str, int, int], None] | None = None
        self._capacity = _UNLIMITED if capacity_bytes is None else capacity_bytes
        self.configure(settings)

    def configure(self, settings: AllocatorSettings) -> None:
        """Begin anew under these settings; nothing may be allocated."""
        self.settings = settings
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.retries = 0
        self.fragmented_bytes = 0
        self.missing_bytes = 0
        self.asked_bytes = 0
        self._expandable = settings.expandable_segments
        self._max_split = _UNLIMITED if settings.max_split_bytes is None else settings.max_split_bytes
        self._picks = self._expandable or settings.max_split_bytes is not None
        self._rounds = max(settings.roundup_power2_divisions) > 1
        self._large_rest = MIN_BLOCK_BYTES if self._expandable else SMALL_BYTES + MIN_BLOCK_BYTES
        self._small: list[int] = []
        self._large: list[int] = []
        self._free_size: dict[int, int] = {}
        self._free_start: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._next_address = 0
        self._unmapped: dict[bool, list[int]] = {True: [0], False: [LARGE_RANGE]} if self._expandable else {}
        self._unmapped_end = {start: start + _ENDLESS for starts in self._unmapped.values() for start in starts}
        self._ages = settings.gc_threshold is not None and self._capacity < _UNLIMITED
        self._searches = 0
        self._freed_at: dict[int, int] = {}

    def malloc(self, requested_bytes: int) -> int | None:
        """Hand out a block (``malloc``, ``should_split``, ``alloc_found_block``).

        Args:
            requested_bytes: At least 1; nothing is handed out for less.

        Returns:
            Its address; None where the capacity does not allow it even after all cached memory was given back.
        """
        size = self.settings.round_request(requested_bytes) if self._rounds else (requested_bytes + 511) & -512
        is_small = size <= SMALL_BYTES
        free = self._small if is_small else self._large
        self._searches += not is_small
        at = bisect_left(free, size << _SHIFT)
        if self._picks and at < len(free):
            at = self._pick(free, at, size)
        if at == len(free):
            grown = self._grow(free, is_small, size)
            if grown is None:
                return None
            at = bisect_left(free, self._free_size[grown] << _SHIFT | grown)
        key = free.pop(at)
        start = key & _MASK
        block = key >> _SHIFT
        rest = block - size
        del self._free_size[start]
        if rest >= (MIN_BLOCK_BYTES if is_small else self._large_rest) and (size < self._max_split or self._expandable):
            self._free_size[start + size] = rest
            self._free_start[start + block] = start + size
            insort(free, rest << _SHIFT | start + size)
            block = size
        else:
            del self._free_start[start + block]
        self._live[start] = block
        self.allocated_bytes += block
        return start

    def free(self, address: int) -> None:
        """Take a block back and join it with free neighbours in its segment (``free_block``, ``try_merge_blocks``).

        Raises:
            KeyError: No block at this address is handed out.
        """
        size = self._live.pop(address)
        self.allocated_bytes -= size
        self._give(self._small if size <= SMALL_BYTES else self._large, address, size)

    def release_cached(self) -> None:
        """Give cached memory back to the driver: whole segments, or whole pages (``release_cached_blocks``)."""
        for is_small, free in ((False, self._large), (True, self._small)):
            for key in list(free):
                if self._expandable:
                    self._unmap(free, is_small, key)
                elif self._is_segment(key):
                    self._release(free, key)

    def limit(self, capacity_bytes: int) -> None:
        """Let it take no more than this from the driver, if that is less than before."""
        self._capacity = min(self._capacity, capacity_bytes)

    def _give(self, free: list[int], start: int, size: int) -> None:
        """Add a free block, joined with its free neighbours."""
        before = self._free_start.pop(start, None)
        if before is not None:
            del free[bisect_left(free, start - before << _SHIFT | before)]
            size += start - before
            start = before
        after = self._free_size.pop(start + size, None)
        if after is not None:
            del free[bisect_left(free, after << _SHIFT | start + size)]
            size += after
        self._free_size[start] = size
        self._free_start[start + size] = start
        insort(free, size << _SHIFT | start)
        if self._ages:
            self._freed_at[start] = self._searches

    def _take_out(self, free: list[int], key: int) -> tuple[int, int]:
        """Remove a free block; return its address and size."""
        start = key & _MASK
        size = key >> _SHIFT
        del free[bisect_left(free, key)]
        del self._free_size[start]
        del self._free_start[start + size]
        return start, size

    def _is_segment(self, key: int) -> bool:
        """Whether a free block is a native segment of which nothing is in use."""
        return self._segments.get(key & _MASK) == key >> _SHIFT

    def _pick(self, free: list[int], at: int, size: int) -> int:
        """Index of the free block to use, from the smallest that is large enough on; behind the last for none.

        ``get_free_block``: a block at the border to unmapped addresses counts as large as it can grow, and blocks
        that must not be cut serve only requests of about their size.
        """
        if self._expandable:
            while at + 1 < len(free) and self._growable(free[at + 1]) < self._growable(free[at]):
                at += 1
        block = free[at] >> _SHIFT
        if size < self._max_split:
            return len(free) if block >= self._max_split else at
        return len(free) if block >= size + self.settings.max_non_split_rounding_bytes else at

    def _growable(self, key: int) -> int:
        size = key >> _SHIFT
        end = (key & _MASK) + size
        return size + self._unmapped_end.get(end, end) - end

    def _grow(self, free: list[int], is_small: bool, size: int) -> int | None:
        """Take memory for a request that no cached block serves; return the address of a free block that does."""
        self.fragmented_bytes = max(self.fragmented_bytes, self.reserved_bytes - self.allocated_bytes)
        if self._ages:
            self._collect_garbage()
        start = self._take(free, is_small, size)
        if start is None and self._release_oversize(free, size):
            start = self._take(free, is_small, size)
        if start is None:
            self.retries += 1
            self.release_cached()
            start = self._take(free, is_small, size)
        return start

    def _take(self, free: list[int], is_small: bool, size: int) -> int | None:
        """``alloc_block``: take a segment, or map pages; None where the capacity is used up."""
        segment = self.settings.segment_bytes(size)
        if not self._fits(segment):
            return None
        if self._expandable:
            return self._extend(free, is_small, size)
        start = self._new_segment(segment)
        self._give(free, start, segment)
        return start

    def _fits(self, size: int) -> bool:
        asked_bytes = self.reserved_bytes + size
        if asked_bytes <= self._capacity:
            self.asked_bytes = max(self.asked_bytes, asked_bytes)
            return True
        self.missing_bytes = asked_bytes
        return False

    def _new_segment(self, size: int) -> int:
        start = self._next_address
        self.reserved_bytes += size
        # The gap keeps blocks of different segments from being neighbours.
        self._next_address += size + MIN_BLOCK_BYTES
        self._segments[start] = size
        if self.on_segment is not None:
            self.on_segment("segment_alloc", start, size)
        return start

    def _release(self, free: list[int], key: int) -> int:
        start, size = self._take_out(free, key)
        del self._segments[start]
        self.reserved_bytes -= size
        if self.on_segment is not None:
            self.on_segment("segment_free", start, size)
        return size

    def _release_oversize(self, free: list[int], size: int) -> bool:
        """Give back blocks that are never cut, as few as make room (``release_available_cached_blocks``)."""
        if self._max_split == _UNLIMITED or self._expandable:
            return False
        wanted = max(size, self._max_split)
        at = bisect_left(free, wanted << _SHIFT)
        if at < len(free):
            self._release(free, free[at])
            return True
        released = 0
        while released < wanted and free and free[-1] >> _SHIFT >= self._max_split:
            released += self._release(free, free[-1])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back the segments unused for longest (``garbage_collect_cached_blocks``)."""
        threshold = int((self.settings.gc_threshold or 0) * self._capacity)
        target = self.reserved_bytes - threshold
        if target <= 0:
            return
        ages = {key: self._searches - self._freed_at[key & _MASK] for key in self._large if self._is_segment(key)}
        reclaimed = 0
        has_freed = True
        while reclaimed < target and has_freed and ages:
            average = sum(ages.values()) / len(ages)
            old = [key for key, age in ages.items() if age >= average]
            has_freed = bool(old)
            for key in old:
                del ages[key]
                reclaimed += self._release(self._large, key)

    def _extend(self, free: list[int], is_small: bool, size: int) -> int | None:
        """Map pages where the lowest address has room (``try_allocate_expandable_block``); where the room begins."""
        start = self._find_room(is_small, size)
        while self._free_size.get(start, 0) < size:
            have = self._free_size.get(start, 0)
            border = start + have
            if not self._map(free, is_small, border, min(size - have, self._unmapped_end[border] - border)):
                return None
        return start

    def _find_room(self, is_small: bool, size: int) -> int:
        """``find_expandable_block``: unmapped addresses, with the free block before them, that hold the request."""
        for unmapped in self._unmapped[is_small]:
            start = end = self._free_start.get(unmapped, unmapped)
            while end - start < size:
                step = self._free_size.get(end) or self._unmapped_end.get(end, end) - end
                if step == 0:
                    break
                end += step
            else:
                return start
        raise InternalError("simulating the allocator", f"no addresses for {size} bytes")

    def _page_bytes(self, is_small: bool) -> int:
        return SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes

    def _map(self, free: list[int], is_small: bool, start: int, wanted: int) -> bool:
        """Map whole pages from an unmapped address on (``map_block``)."""
        page = self._page_bytes(is_small)
        mapped = -(-wanted // page) * page
        if not self._fits(mapped):
            return False
        self.reserved_bytes += mapped
        starts = self._unmapped[is_small]
        del starts[bisect_left(starts, start)]
        end = self._unmapped_end.pop(start)
        if start + mapped < end:
            insort(starts, start + mapped)
            self._unmapped_end[start + mapped] = end
        self._give(free, start, mapped)
        if self.on_segment is not None:
            self.on_segment("segment_map", start, mapped)
        return True

    def _unmap(self, free: list[int], is_small: bool, key: int) -> None:
        """Give back the whole pages of a free block (``unmap_block``)."""
        page = self._page_bytes(is_small)
        base = 0 if is_small else LARGE_RANGE
        start, size = key & _MASK, key >> _SHIFT
        low = base - (base - start) // page * page
        high = base + (start + size - base) // page * page
        if low >= high:
            return
        self._take_out(free, key)
        for left, right in ((start, low), (high, start + size)):
            if left < right:
                self._give(free, left, right - left)
        self.reserved_bytes -= high - low
        if self.on_segment is not None:
            self.on_segment("segment_unmap", low, high - low)
        starts = self._unmapped[is_small]
        at = bisect_left(starts, low)
        if at < len(starts) and starts[at] == high:
            high = self._unmapped_end.pop(starts.pop(at))
        if at > 0 and self._unmapped_end[starts[at - 1]] == low:
            low = starts.pop(at - 1)
        insort(starts, low)
        self._unmapped_end[low] = high


# Replay allocations through the simulated caching allocator: peaks, fragmentation, the smallest capacity.
#
# Pure functions over columns of events as in :class:`dryfit.gpu.events.Segment`: event ``i`` is about block
# ``blocks[i]`` and takes ``deltas[i]`` bytes, or gives the block back where that is below 0.


_CLIMBS = 4
"""Capacities tried upwards from the peak, each as large as the failure before asked for, before halving begins."""
_SHUFFLES = 3


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        peak_allocated_bytes: Most memory in blocks handed out: ``torch.cuda.max_memory_allocated``.
        peak_reserved_bytes: Most memory taken from the driver: ``torch.cuda.max_memory_reserved``.
        peak_event: Index of the event with which ``peak_allocated_bytes`` was first reached; -1 without events.
        fragmented_bytes: Most memory reserved but not allocated when the allocator had to ask the driver for more.
        retries: How often all cached memory was given back to go on (``num_alloc_retries``).
        oom_event: The event that could not be served; nothing after it counts. None where all were.
        missing_bytes: The capacity that this event would have needed; 0 where all were served.
        asked_bytes: The largest capacity that a granted request to the driver asked for: somewhat more than
            ``peak_reserved_bytes`` where segments expandable by pages ask for more than they take.
        final_reserved_bytes: Reserved after the last event.
        final_allocated_bytes: Allocated after the last event.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_event: int
    fragmented_bytes: int
    retries: int
    oom_event: int | None
    missing_bytes: int
    asked_bytes: int
    final_reserved_bytes: int
    final_allocated_bytes: int


def replay(
    blocks: Sequence[int], deltas: Sequence[int], settings: AllocatorSettings, *, capacity_bytes: int | None = None
) -> Replay:
    """Run events through the allocator.

    Args:
        blocks: Number of the block of each event; a number may be used again once its block is freed.
        deltas: Bytes asked for, above 0; below 0 where the block is freed.
        settings: Of the allocator.
        capacity_bytes: Most memory it may take from the driver; None for as much as is asked.

    Raises:
        InternalError: A block is freed that is not in use, or allocated that is.
    """
    allocator = CachingAllocator(settings, capacity_bytes)
    malloc, free = allocator.malloc, allocator.free
    address_of: dict[int, int] = {}
    peak_allocated = peak_reserved = 0
    peak_event = -1
    oom_event: int | None = None
    for index, (block, delta) in enumerate(zip(blocks, deltas, strict=True)):
        if (delta > 0) == (block in address_of):
            state = "in use already" if delta > 0 else "not in use"
            raise InternalError("replaying allocations", f"event {index} is about block {block}, which is {state}")
        if delta <= 0:
            free(address_of.pop(block))
            continue
        address = malloc(delta)
        if address is None:
            oom_event = index
            break
        address_of[block] = address
        if allocator.allocated_bytes > peak_allocated:
            peak_allocated = allocator.allocated_bytes
            peak_event = index
        if allocator.reserved_bytes > peak_reserved:
            peak_reserved = allocator.reserved_bytes
    return Replay(
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        peak_event=peak_event,
        fragmented_bytes=allocator.fragmented_bytes,
        retries=allocator.retries,
        oom_event=oom_event,
        missing_bytes=0 if oom_event is None else allocator.missing_bytes,
        asked_bytes=allocator.asked_bytes,
        final_reserved_bytes=allocator.reserved_bytes,
        final_allocated_bytes=allocator.allocated_bytes,
    )


def min_cap(
    blocks: Sequence[int],
    deltas: Sequence[int],
    settings: AllocatorSettings,
    *,
    tolerance_bytes: int = 2 * MIB,
    unlimited: Replay | None = None,
) -> int:
    """Return the smallest capacity with which the events go through, to about ``tolerance_bytes``.

    More capacity is not always better: where cached memory is given back depends on it, and so does where later
    blocks lie. The answer was replayed and survives, as does the capacity ``tolerance_bytes`` above it and
    every larger one that was tried; all smaller ones that were tried fail. Those in between are not known.

    Args:
        blocks: As for :func:`replay`.
        deltas: As for :func:`replay`.
        settings: Of the allocator.
        tolerance_bytes: How far above the smallest the answer may be. Where the peaks of reserved and allocated
            memory are as close as this, nothing is searched.
        unlimited: The replay without a capacity, where it is known already.
    """
    plenty = unlimited or replay(blocks, deltas, settings)
    # Where no request is refused, a capacity changes nothing; garbage collection goes by the capacity itself.
    enough = plenty.asked_bytes if settings.gc_threshold is None else None

    @cache
    def wanted(capacity: int) -> int | None:
        """The next capacity worth trying after this one fails; None where it survives."""
        if enough is not None and capacity >= enough:
            return None
        outcome = replay(blocks, deltas, settings, capacity_bytes=capacity)
        return None if outcome.oom_event is None else max(outcome.missing_bytes, capacity + tolerance_bytes)

    fails, survives = plenty.peak_allocated_bytes - 1, plenty.peak_reserved_bytes
    if survives - fails > tolerance_bytes:
        fails, survives = _climb(plenty.peak_allocated_bytes, survives, wanted)
        # Mostly nothing below what a failure asked for survives, and one more replay shows it.
        step = tolerance_bytes
        while survives - fails > tolerance_bytes:
            tried = max(survives - step, (survives + fails) // 2)
            if wanted(tried) is not None:
                fails = tried
                continue
            survives = tried
            step = survives - fails
    return _settle(survives, tolerance_bytes, wanted)


def _climb(start: int, most: int, wanted: Callable[[int], int | None]) -> tuple[int, int]:
    """Climb to the capacity that each failure asks for; return the last that fails and the first that survives."""
    fails, capacity = start - 1, start
    for _ in range(_CLIMBS):
        if capacity >= most:
            break
        following = wanted(capacity)
        if following is None:
            return fails, capacity
        fails, capacity = capacity, following
    return fails, most


def _settle(capacity: int, tolerance_bytes: int, wanted: Callable[[int], int | None]) -> int:
    """Return the first capacity, from one on, that survives as does the next above it."""
    while True:
        following = wanted(capacity)
        if following is None:
            following = wanted(capacity + tolerance_bytes)
            if following is None:
                return capacity
        capacity = following


def sequences(lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    """Return orders of batches of these lengths, to find one that fragments memory.

    Args:
        lengths: Length of each batch.
        seed: Of the shuffles.

    Returns:
        As given, sorted both ways, from the outside in beginning with the longest or the shortest, and shuffled.
    """
    rising = sorted(lengths)
    falling = rising[::-1]
    random = Random(seed)
    shuffled = [random.sample(rising, len(rising)) for _ in range(_SHUFFLES)]
    return [list(lengths), rising, falling, _alternate(falling, rising), _alternate(rising, falling), *shuffled]


def _alternate(first: list[int], second: list[int]) -> list[int]:
    """One of each in turn, until as many are taken as one of them has."""
    return [length for pair in zip(first, second, strict=True) for length in pair][: len(first)]
