"""The rules of the CUDA caching allocator in the plainest form: every decision scans a list of all parts.

A second reading of ``c10/cuda/CUDACachingAllocator.cpp``, to hold the fast simulator against.
"""

from dataclasses import dataclass, field
from enum import Enum

from dryfit.gpu.allocator_settings import AllocatorSettings

MIB = 2**20
ENDLESS = 2**55


class State(Enum):
    """Of a part of a segment."""

    USED = "used"
    FREE = "free"
    UNMAPPED = "unmapped"


@dataclass(eq=False)
class Part:
    """A block."""

    size: int
    state: State
    freed_at: int = 0


@dataclass(eq=False)
class Parts:
    """A segment: parts side by side."""

    is_small: bool
    parts: list[Part] = field(default_factory=list[Part])

    def join(self) -> None:
        """Make one of neighbours that are both free or both unmapped; the later time of freeing stays."""
        joined: list[Part] = []
        for part in self.parts:
            if joined and part.state is not State.USED and joined[-1].state is part.state:
                joined[-1].size += part.size
                joined[-1].freed_at = max(joined[-1].freed_at, part.freed_at)
            else:
                joined.append(part)
        self.parts = joined


class SlowAllocator:
    """Same results as ``CachingAllocator``, in quadratic time."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.settings = settings
        self.capacity = capacity
        self.retries = 0
        self.searches = 0
        self.segments: list[Parts] = []
        if settings.expandable_segments:
            self.segments = [Parts(small, [Part(ENDLESS, State.UNMAPPED)]) for small in (True, False)]

    @property
    def reserved(self) -> int:
        """Mapped bytes."""
        return sum(part.size for s in self.segments for part in s.parts if part.state is not State.UNMAPPED)

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return sum(part.size for s in self.segments for part in s.parts if part.state is State.USED)

    def layout(self) -> list[list[tuple[int, bool]]]:
        """Mapped stretches: sizes of their parts, and whether they are in use."""
        found: list[list[tuple[int, bool]]] = []
        for segment in self.segments:
            stretch: list[tuple[int, bool]] = []
            for part in segment.parts:
                if part.state is State.UNMAPPED:
                    found.append(stretch)
                    stretch = []
                else:
                    stretch.append((part.size, part.state is State.USED))
            found.append(stretch)
        return [stretch for stretch in found if stretch]

    def round(self, requested: int) -> int:
        """round_size and roundup_power2_next_division."""
        if requested < 512:
            return 512
        interval = 0
        while interval < 15 and requested >= MIB << (interval + 1):
            interval += 1
        divisions = self.settings.roundup_power2_divisions[interval]
        if divisions <= 1 or requested <= 512 * divisions:
            return (requested + 511) // 512 * 512
        floor = 1
        while floor * 2 <= requested:
            floor *= 2
        rounded = floor
        while rounded < requested:
            rounded += floor // divisions
        return rounded

    def malloc(self, requested: int) -> Part | None:
        """get_free_block, else alloc_block and its retries; then should_split."""
        size = self.round(requested)
        is_small = size <= MIB
        self.searches += not is_small
        found = self._cached(size, is_small)
        if found is None:
            if self.settings.gc_threshold is not None and self.capacity is not None:
                self._collect(int(self.settings.gc_threshold * self.capacity))
            found = self._new(size, is_small)
            if found is None and self._release_oversize(size, is_small):
                found = self._new(size, is_small)
            if found is None:
                self.retries += 1
                self.release_cached()
                found = self._new(size, is_small)
        if found is None:
            return None
        segment, part = found
        rest = part.size - size
        max_split = self.settings.max_split_bytes
        if is_small or self.settings.expandable_segments:
            is_split = rest >= 512
        else:
            is_split = (max_split is None or size < max_split) and rest > MIB
        if not is_split:
            part.state = State.USED
            return part
        used = Part(size, State.USED)
        part.size = rest
        part.freed_at = self.searches
        segment.parts.insert(segment.parts.index(part), used)
        return used

    def free(self, part: Part) -> None:
        """free_block."""
        part.state = State.FREE
        part.freed_at = self.searches
        for segment in self.segments:
            segment.join()

    def release_cached(self) -> None:
        """release_cached_blocks: whole segments, or the whole pages of free parts."""
        if not self.settings.expandable_segments:
            self.segments = [s for s in self.segments if not self._is_idle(s)]
            return
        for segment in self.segments:
            page = self._page(segment.is_small)
            parts: list[Part] = []
            start = 0
            for part in segment.parts:
                low, high = -(-start // page) * page, (start + part.size) // page * page
                if part.state is State.FREE and low < high:
                    pieces = ((low - start, State.FREE), (high - low, State.UNMAPPED))
                    parts += [Part(size, state) for size, state in pieces if size]
                    parts += [Part(start + part.size - high, State.FREE)] if start + part.size > high else []
                else:
                    parts.append(part)
                start += part.size
            segment.parts = parts
            segment.join()

    def _page(self, is_small: bool) -> int:
        return 2 * MIB if is_small else self.settings.large_segment_bytes

    def _is_idle(self, segment: Parts) -> bool:
        return len(segment.parts) == 1 and segment.parts[0].state is State.FREE

    def _cached(self, size: int, is_small: bool) -> tuple[Parts, Part] | None:
        free: list[tuple[int, int, Parts, Part]] = []
        for segment in self.segments:
            if segment.is_small != is_small:
                continue
            for at, part in enumerate(segment.parts):
                if part.state is State.FREE and part.size >= size:
                    after = segment.parts[at + 1] if at + 1 < len(segment.parts) else None
                    grown = part.size + (after.size if after and after.state is State.UNMAPPED else 0)
                    free.append((part.size, grown, segment, part))
        if not free:
            return None
        free.sort(key=lambda candidate: candidate[0])
        if self.settings.expandable_segments:
            while len(free) > 1 and free[1][1] < free[0][1]:
                free.pop(0)
        have, _, segment, part = free[0]
        max_split = self.settings.max_split_bytes
        if max_split is not None and size < max_split <= have:
            return None
        if max_split is not None and size >= max_split and have >= size + self.settings.max_non_split_rounding_bytes:
            return None
        return segment, part

    def _new(self, size: int, is_small: bool) -> tuple[Parts, Part] | None:
        if is_small:
            taken = 2 * MIB
        elif size < 10 * MIB:
            taken = self.settings.large_segment_bytes
        else:
            taken = -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved + taken > self.capacity:
            return None
        if self.settings.expandable_segments:
            return self._extend(size, is_small)
        segment = Parts(is_small, [Part(taken, State.FREE, self.searches)])
        self.segments.append(segment)
        return segment, segment.parts[0]

    def _extend(self, size: int, is_small: bool) -> tuple[Parts, Part] | None:
        segment = next(s for s in self.segments if s.is_small == is_small)
        page = self._page(is_small)
        first = self._room(segment, size)
        while True:
            part = segment.parts[first]
            if part.state is State.FREE and part.size >= size:
                return segment, part
            at = first if part.state is State.UNMAPPED else first + 1
            have = 0 if at == first else part.size
            hole = segment.parts[at]
            mapped = -(-min(size - have, hole.size) // page) * page
            if self.capacity is not None and self.reserved + mapped > self.capacity:
                return None
            hole.size -= mapped
            segment.parts.insert(at, Part(mapped, State.FREE, self.searches))
            segment.parts = [p for p in segment.parts if p.size]
            segment.join()

    def _room(self, segment: Parts, size: int) -> int:
        for at, part in enumerate(segment.parts):
            if part.state is not State.UNMAPPED:
                continue
            first = at - 1 if at and segment.parts[at - 1].state is State.FREE else at
            room = 0
            for follower in segment.parts[first:]:
                if follower.state is State.USED:
                    break
                room += follower.size
            if room >= size:
                return first
        raise AssertionError("the last part has no end")

    def _release_oversize(self, size: int, is_small: bool) -> bool:
        max_split = self.settings.max_split_bytes
        if max_split is None or self.settings.expandable_segments:
            return False
        wanted = max(size, max_split)
        idle = [s for s in self.segments if s.is_small == is_small and self._is_idle(s)]
        idle = sorted((s for s in idle if s.parts[0].size >= max_split), key=lambda s: s.parts[0].size)
        for segment in idle:
            if segment.parts[0].size >= wanted:
                self.segments.remove(segment)
                return True
        released = 0
        for segment in reversed(idle):
            if released >= wanted:
                break
            self.segments.remove(segment)
            released += segment.parts[0].size
        return released >= wanted

    def _collect(self, threshold: int) -> None:
        reclaimed, target = 0, self.reserved - threshold
        idle = [s for s in self.segments if not s.is_small and self._is_idle(s)]
        while target > 0 and reclaimed < target and idle:
            average = sum(self.searches - s.parts[0].freed_at for s in idle) / len(idle)
            old = [s for s in idle if self.searches - s.parts[0].freed_at >= average]
            for segment in old:
                idle.remove(segment)
                self.segments.remove(segment)
                reclaimed += segment.parts[0].size
            if not old:
                break
