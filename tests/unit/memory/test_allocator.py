"""Cases computed by hand from the rules of ``c10/cuda/CUDACachingAllocator.cpp``, and published measurements.

Sizes are in MiB unless they say otherwise.
"""

import pytest

from dryfit.core.errors import InternalError
from dryfit.memory.allocator.caching_allocator import CachingAllocator
from dryfit.memory.allocator.replay import Replay, min_cap, replay, sequences
from dryfit.memory.allocator.settings import MIB, AllocatorSettings
from snapshots import segments_of

NATIVE = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def _layout(allocator: CachingAllocator) -> list[list[tuple[float, bool]]]:
    """Each segment's blocks: MiB, and whether they are in use."""
    return [[(b.size_bytes / MIB, b.is_allocated) for b in segment.blocks] for segment in segments_of(allocator)]


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


class TestNativeSegments:
    def test_segment_sizes_by_request(self) -> None:
        """get_allocation_size: up to 1 from 2, below 10 from 20, from 10 on rounded up to 2."""
        assert [_run([size], NATIVE).peak_reserved_bytes / MIB for size in (0.001, 1, 1.5, 9.9, 10, 10.1, 21)] == [
            2,
            2,
            20,
            20,
            10,
            12,
            22,
        ]

    def test_a_small_block_is_cut_where_512_bytes_are_left(self) -> None:
        """should_split: the small pool keeps remainders from 512 bytes on."""
        allocator = CachingAllocator(NATIVE)
        allocator.malloc(100)
        assert allocator.allocated_bytes == 512
        assert _layout(allocator) == [[(512 / MIB, True), (2 - 512 / MIB, False)]]

    def test_a_large_block_is_cut_only_where_more_than_1_mib_is_left(self) -> None:
        """should_split: in the large pool a remainder must be above kSmallSize, else the block stays whole."""
        allocator = CachingAllocator(NATIVE)
        whole = allocator.malloc(11 * MIB)
        assert whole is not None
        assert _layout(allocator) == [[(12, True)]]
        assert allocator.allocated_bytes == 12 * MIB
        allocator.free(whole)
        allocator.malloc(11 * MIB - 512)
        assert _layout(allocator) == [[(11 - 512 / MIB, True), (1 + 512 / MIB, False)]]

    def test_the_smallest_block_that_fits_is_used_and_the_older_of_two_equal_ones(self) -> None:
        """get_free_block: lower_bound in a set ordered by size, then by age of the segment and address."""
        allocator = CachingAllocator(NATIVE)
        addresses = [allocator.malloc(size * MIB) for size in (30, 24, 26, 24)]
        for address in reversed(addresses):
            assert address is not None
            allocator.free(address)
        assert allocator.malloc(23 * MIB) == addresses[1]
        assert allocator.malloc(23 * MIB) == addresses[3]
        assert allocator.malloc(25 * MIB) == addresses[2]
        assert allocator.malloc(11 * MIB) == addresses[0]
        assert allocator.reserved_bytes == 104 * MIB

    def test_neighbours_are_joined_but_not_across_segments(self) -> None:
        """try_merge_blocks: prev and next of one segment only."""
        allocator = CachingAllocator(NATIVE)
        parts = [allocator.malloc(5 * MIB) for _ in range(5)]
        assert _layout(allocator) == [[(5, True)] * 4, [(5, True), (15, False)]]
        for part in (parts[0], parts[2], parts[3], parts[4]):
            assert part is not None
            allocator.free(part)
        assert _layout(allocator) == [[(5, False), (5, True), (10, False)], [(20, False)]]

    def test_small_blocks_never_come_from_large_segments(self) -> None:
        """get_pool: two pools, by the size of the request."""
        assert _run([15, -15, 1], NATIVE).final_reserved_bytes == (16 + 2) * MIB

    def test_with_no_room_unused_segments_are_given_back_and_it_goes_on(self) -> None:
        """alloc_block, then release_cached_blocks, then alloc_block again: one num_alloc_retries."""
        outcome = _run([30, 12, -30, 40], NATIVE, capacity=60)
        assert (outcome.retries, outcome.oom_event, outcome.peak_reserved_bytes) == (1, None, 52 * MIB)

    def test_a_segment_with_one_block_in_use_is_kept_and_what_is_left_may_not_do(self) -> None:
        """release_blocks: only where a block has neither prev nor next."""
        outcome = _run([5, 12, -12, 50], NATIVE, capacity=60)
        assert outcome.oom_event == 3
        assert outcome.retries == 1
        assert outcome.missing_bytes == (20 + 50) * MIB
        assert outcome.final_reserved_bytes == 20 * MIB
        assert outcome.fragmented_bytes == (20 - 5) * MIB

    def test_an_older_segment_is_given_back_before_the_capacity_is_reached(self) -> None:
        """garbage_collect_cached_blocks: above the threshold, all of at least the average age."""
        settings = AllocatorSettings(gc_threshold=0.5)
        # When 50 is asked for, the 30 have been free for 3 searches of the large pool and the 40 for 1: 2 on average.
        events = [30, -30, 44, 40, -40, 50]
        assert _run(events, settings, capacity=200).final_reserved_bytes == (44 + 40 + 50) * MIB
        assert _run(events, settings).final_reserved_bytes == (30 + 44 + 40 + 50) * MIB
        # A single one is as old as the average.
        assert _run([30, -30, 44, 50], settings, capacity=140).final_reserved_bytes == (44 + 50) * MIB


class TestMaxSplitSize:
    SETTINGS = AllocatorSettings(max_split_bytes=100 * MIB)

    def test_a_block_from_the_limit_on_serves_no_smaller_request(self) -> None:
        """get_free_block: size < max_split_size <= block gives none."""
        assert _run([100, -100, 90], self.SETTINGS).final_reserved_bytes == 190 * MIB
        assert _run([98, -98, 90], self.SETTINGS).final_reserved_bytes == 98 * MIB

    def test_a_request_from_the_limit_on_takes_a_block_less_than_20_mib_larger_and_does_not_cut_it(self) -> None:
        """get_free_block: block >= size + max_non_split_rounding_size gives none; should_split says no."""
        outcome = _run([118, -118, 100], self.SETTINGS)
        assert (outcome.final_reserved_bytes, outcome.final_allocated_bytes) == (118 * MIB, 118 * MIB)
        assert _run([120, -120, 100], self.SETTINGS).final_reserved_bytes == 220 * MIB

    def test_the_example_of_the_option_for_the_slack(self) -> None:
        """https://github.com/pytorch/pytorch/pull/136174: 400 may not be cut, 1024 is cached, 512 is asked for."""
        events = [1024, -1024, 512]
        assert _run(events, AllocatorSettings(max_split_bytes=400 * MIB)).final_reserved_bytes == 1536 * MIB
        wide = AllocatorSettings(max_split_bytes=400 * MIB, max_non_split_rounding_bytes=513 * MIB)
        assert _run(events, wide).final_reserved_bytes == 1024 * MIB

    def test_with_no_room_one_such_block_that_is_large_enough_is_given_back_without_a_retry(self) -> None:
        """release_available_cached_blocks: lower_bound of the larger of request and limit."""
        outcome = _run([100, 140, 180, -100, -140, -180, 120], self.SETTINGS, capacity=430)
        assert (outcome.final_reserved_bytes, outcome.retries) == ((100 + 180 + 120) * MIB, 0)

    def test_or_several_from_the_largest_down(self) -> None:
        """release_available_cached_blocks: no single one is large enough."""
        outcome = _run([100, 110, 120, -100, -110, -120, 200], self.SETTINGS, capacity=330)
        assert (outcome.final_reserved_bytes, outcome.retries) == ((100 + 200) * MIB, 0)


class TestExpandableSegments:
    def test_pages_of_2_and_20_mib_are_mapped_as_needed(self) -> None:
        """ExpandableSegment::map rounds to pages; the small pool has its own segment."""
        assert [_run(sizes, EXPANDABLE).final_reserved_bytes / MIB for sizes in ([0.1], [1.5], [21], [15, 15, 15])] == [
            2,
            20,
            40,
            60,
        ]

    def test_any_remainder_from_512_bytes_on_is_cut(self) -> None:
        """should_split: as in the small pool where segments expand."""
        allocator = CachingAllocator(EXPANDABLE)
        allocator.malloc(19 * MIB + 512 * 1024)
        assert _layout(allocator) == [[(19.5, True), (0.5, False)]]

    def test_what_is_free_at_the_end_is_used_before_more_is_mapped(self) -> None:
        """try_allocate_expandable_block: free -> unmapped; only the missing pages are mapped."""
        outcome = _run([15, 30], EXPANDABLE)
        assert (outcome.final_allocated_bytes, outcome.final_reserved_bytes) == (45 * MIB, 60 * MIB)

    def test_a_block_at_the_border_counts_as_large_as_it_can_grow(self) -> None:
        """get_free_block: the smaller block at the end is passed over for a larger one that cannot grow."""
        allocator = CachingAllocator(EXPANDABLE)
        first = allocator.malloc(12 * MIB)
        allocator.malloc(18 * MIB)
        assert first is not None
        allocator.free(first)
        assert _layout(allocator) == [[(12, False), (18, True), (10, False)]]
        assert allocator.malloc(9 * MIB) == first

    def test_with_no_room_whole_pages_are_unmapped_and_holes_are_mapped_again_from_the_lowest_address(self) -> None:
        """unmap_block, then find_expandable_block."""
        allocator = CachingAllocator(EXPANDABLE, 120 * MIB)
        first, second, third = (allocator.malloc(size * MIB) for size in (50, 10, 60))
        assert None not in (first, second, third)
        assert first is not None
        allocator.free(first)
        assert allocator.malloc(55 * MIB) is None
        # Pages 0 and 1 of the 50 free MiB are unmapped; page 2 holds 10 of them and the block of 10.
        assert allocator.retries == 1
        assert _layout(allocator) == [[(10, False), (10, True), (60, True)]]
        assert allocator.malloc(40 * MIB) == first
        assert _layout(allocator) == [[(40, True), (10, False), (10, True), (60, True)]]

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
    def test_peaks_and_ends(self) -> None:
        outcome = _run([15, 11, -15, 0.5], NATIVE)
        assert outcome == Replay(
            peak_allocated_bytes=(15 + 1 + 12) * MIB,
            peak_reserved_bytes=(16 + 12 + 2) * MIB,
            peak_event=1,
            fragmented_bytes=16 * MIB,
            retries=0,
            oom_event=None,
            missing_bytes=0,
            asked_bytes=30 * MIB,
            final_reserved_bytes=30 * MIB,
            final_allocated_bytes=12 * MIB + MIB // 2,
        )

    def test_nothing_happens_without_events(self) -> None:
        outcome = replay([], [], NATIVE)
        assert (outcome.peak_reserved_bytes, outcome.peak_event, outcome.oom_event) == (0, -1, None)
        assert min_cap([], [], NATIVE) == 0

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
