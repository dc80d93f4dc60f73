"""Simulate PyTorch's CUDA caching allocator: the same blocks in the same places, without a device.

It follows ``DeviceCachingAllocator`` of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11 to 2.13) for one device,
one stream and no CUDA graphs; the functions named in the docstrings are found there. What differs, and why:

* A segment's address is above those of all earlier segments. Torch orders free blocks of one size by the age of
  their segment, then by address, which is the same.
* An expandable segment's range of addresses has no end. Torch reserves 9/8 of the device's memory per pool and
  begins another segment only where that is used up, by holes that stay unmapped.
* The capacity bounds the memory that is mapped, as the device does, and also the check that torch makes before
  it takes a segment where the process may only have a fraction of the device. For native segments both are the
  same; for expandable ones either alone would let through up to a page more.
"""

from bisect import bisect_left, insort

from dryfit.core.errors import InternalError
from dryfit.memory.allocator.settings import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings

_SHIFT = 60
"""A free block is kept as ``size << _SHIFT | address``: integers sort by size, then by address, and compare fast."""
_MASK = (1 << _SHIFT) - 1
_LARGE_RANGE = 1 << 56
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
    """

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None = None) -> None:
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
        self._unmapped: dict[bool, list[int]] = {True: [0], False: [_LARGE_RANGE]} if self._expandable else {}
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
        return start

    def _release(self, free: list[int], key: int) -> int:
        start, size = self._take_out(free, key)
        del self._segments[start]
        self.reserved_bytes -= size
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
        return True

    def _unmap(self, free: list[int], is_small: bool, key: int) -> None:
        """Give back the whole pages of a free block (``unmap_block``)."""
        page = self._page_bytes(is_small)
        base = 0 if is_small else _LARGE_RANGE
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
        starts = self._unmapped[is_small]
        at = bisect_left(starts, low)
        if at < len(starts) and starts[at] == high:
            high = self._unmapped_end.pop(starts.pop(at))
        if at > 0 and self._unmapped_end[starts[at - 1]] == low:
            low = starts.pop(at - 1)
        insort(starts, low)
        self._unmapped_end[low] = high
