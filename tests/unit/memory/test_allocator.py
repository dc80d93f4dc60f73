"""Cases computed by hand from the rules of ``c10/cuda/CUDACachingAllocator.cpp``, and published measurements.

Sizes are in MiB unless they say otherwise.
"""

import pytest

from dryfit.gpu.allocator_settings import MIB, AllocatorSettings
from dryfit.gpu.caching_allocator import CachingAllocator, Replay, min_cap, replay, sequences
from dryfit.settings.errors import InternalError

NATIVE = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def _run(megabytes: list[float], settings: AllocatorSettings, capacity: float | None = None) -> Replay:
    """Replay: a number allocates that much, its negative frees the oldest block of this size."""
    blocks: list[int] = []
    deltas: list[int] = []
    live: dict[int, list[int]] = {}
    for number, amount in enumerate(megabytes):
        size = int(abs(amount) * MIB)
        if amount > 0:
            live.setdefault(size, []).append(number)
            blocks.append(number)
        else:
            blocks.append(live[size].pop(0))
        deltas.append(size if amount > 0 else -size)
    return replay(blocks, deltas, settings, capacity_bytes=None if capacity is None else int(capacity * MIB))


class TestExpandableSegments:
    def test_with_max_split_size_reserved_grows_as_measured_on_a_16_gib_card(self) -> None:
        """https://github.com/pytorch/pytorch/pull/193400, with the block of 64 MiB of its reproducer.

        The first retry of that run, at cycle 115, and what it left are from
        https://github.com/ROCm/legacy-rocm-build/issues/6603; the memory that card had left is not in it.
        """
        allocator = CachingAllocator(
            AllocatorSettings.parse("max_split_size_mb:128,expandable_segments:True"), 16_030 * MIB
        )
        allocator.malloc(64 * MIB)
        measured: dict[int, tuple[float, float, int]] = {}
        for cycle in range(116):
            large, half, _ = (allocator.malloc(int(size * MIB)) for size in (91, 45.5, 2))
            assert large is not None
            assert half is not None
            allocator.free(large)
            allocator.free(half)
            measured[cycle] = (allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB, allocator.retries)
        table = {0: (66, 220), 20: (106, 2980), 40: (146, 5760), 60: (186, 8520), 80: (226, 11300), 100: (266, 14060)}
        assert {cycle: measured[cycle] for cycle in table} == {at: (*row, 0) for at, row in table.items()}
        assert measured[114] == (294, 16000, 0)
        assert measured[115] == (296, 2680, 1)


class TestReplay:
    @pytest.mark.parametrize(
        ("deltas", "found"),
        [((512, -512, -512), "event 2 is about block 0, which is not in use"), ((512, 64), "which is in use already")],
    )
    def test_a_block_that_comes_or_goes_twice_is_our_mistake(self, deltas: tuple[int, ...], found: str) -> None:
        with pytest.raises(InternalError, match=found):
            replay([0] * len(deltas), deltas, NATIVE)


class TestMinCap:
    # 30 and 12 are cached when 40 is asked for: 82 are reserved with plenty, but 52 will do.
    BLOCKS = (0, 1, 0, 2)
    DELTAS = (30 * MIB, 12 * MIB, -30 * MIB, 40 * MIB)

    def test_it_is_below_what_is_reserved_with_plenty(self) -> None:
        assert replay(self.BLOCKS, self.DELTAS, NATIVE).peak_reserved_bytes == 82 * MIB
        assert min_cap(self.BLOCKS, self.DELTAS, NATIVE) == 52 * MIB
        assert replay(self.BLOCKS, self.DELTAS, NATIVE, capacity_bytes=52 * MIB).oom_event is None
        assert replay(self.BLOCKS, self.DELTAS, NATIVE, capacity_bytes=52 * MIB - 1).oom_event == 3

    def test_where_the_peaks_are_close_reserved_is_the_answer(self) -> None:
        plenty = replay([0], [11 * MIB], NATIVE)
        assert min_cap([0], [11 * MIB], NATIVE, unlimited=plenty) == 12 * MIB

    def test_holes_that_no_giving_back_removes_count(self) -> None:
        # Four blocks of 5 fill a segment of 20; the second and fourth stay, so 11 more need a segment of their own.
        blocks, deltas = (0, 1, 2, 3, 0, 2, 4), tuple(size * MIB for size in (5, 5, 5, 5, -5, -5, 11))
        assert min_cap(blocks, deltas, NATIVE) == (20 + 12) * MIB

    def test_expandable_segments_need_whole_pages(self) -> None:
        assert min_cap((0,), (21 * MIB,), EXPANDABLE) == 40 * MIB


class TestOrders:
    def test_the_orders(self) -> None:
        given, rising, falling, longest_first, shortest_first, *shuffled = sequences([3, 1, 4, 2], seed=7)
        assert given == [3, 1, 4, 2]
        assert (rising, falling) == ([1, 2, 3, 4], [4, 3, 2, 1])
        assert (longest_first, shortest_first) == ([4, 1, 3, 2], [1, 4, 2, 3])
        assert len(shuffled) == 3

    def test_rising_sizes_leave_more_unused_when_more_is_needed(self) -> None:
        assert _run([12, -12, 30, -30, 50], NATIVE).fragmented_bytes == 42 * MIB
        assert _run([50, -50, 30, -30, 12], NATIVE).fragmented_bytes == 0
