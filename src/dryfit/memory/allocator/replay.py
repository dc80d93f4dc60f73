"""Replay allocations through the simulated caching allocator: peaks, fragmentation, the smallest capacity.

Pure functions over columns of events as in :class:`dryfit.memory.tracing.events.Segment`: event ``i`` is about block
``blocks[i]`` and takes ``deltas[i]`` bytes, or gives the block back where that is below 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from dryfit.core.errors import InternalError
from dryfit.memory.allocator.caching_allocator import CachingAllocator
from dryfit.memory.allocator.settings import MIB, AllocatorSettings

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
