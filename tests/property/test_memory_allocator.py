"""What holds of the simulated allocator for every sequence of events, with native and expandable segments."""

import dataclasses
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocations import allocator_settings_values, columns
from dryfit.gpu.allocator_settings import MIB, AllocatorSettings
from dryfit.gpu.caching_allocator import CachingAllocator, min_cap, replay, sequences
from slow_allocator import Part, SlowAllocator
from snapshots import segments_of
from thinning import examples

_CAPACITIES = st.one_of(st.none(), st.integers(0, 200).map(lambda megabytes: megabytes * MIB))


def _assert_same(fast: CachingAllocator, slow: SlowAllocator) -> None:
    assert fast.reserved_bytes == slow.reserved
    assert fast.allocated_bytes == slow.allocated
    assert fast.retries == slow.retries
    assert [[(b.size_bytes, b.is_allocated) for b in segment.blocks] for segment in segments_of(fast)] == slow.layout()


@settings(max_examples=examples(400))
@given(columns(), allocator_settings_values(), _CAPACITIES)
def test_it_does_what_the_plain_reading_of_the_rules_does(
    events: tuple[list[int], list[int]], allocator_settings: AllocatorSettings, capacity: int | None
) -> None:
    fast = CachingAllocator(allocator_settings, capacity)
    slow = SlowAllocator(allocator_settings, capacity)
    pairs: dict[int, tuple[int, Part]] = {}
    for block, delta in zip(*events, strict=True):
        if delta > 0:
            address, part = fast.malloc(delta), slow.malloc(delta)
            assert (address is None) == (part is None)
            if address is not None and part is not None:
                pairs[block] = (address, part)
        elif block in pairs:
            address, part = pairs.pop(block)
            fast.free(address)
            slow.free(part)
        _assert_same(fast, slow)


@pytest.mark.parametrize("seed", range(60))
def test_it_does_so_for_long_on_a_device_that_is_often_full(seed: int) -> None:
    random = Random(seed)
    large = random.choice([12, 20, 64]) * MIB
    allocator_settings = AllocatorSettings(
        expandable_segments=seed % 2 == 0,
        max_split_bytes=random.choice([None, large, large + 8 * MIB]),
        gc_threshold=random.choice([None, 0.3, 0.8]),
        large_segment_bytes=large,
        max_non_split_rounding_bytes=random.choice([large, 2 * large]),
    )
    capacity = random.choice([100, 150, 200, 400]) * MIB
    fast, slow = CachingAllocator(allocator_settings, capacity), SlowAllocator(allocator_settings, capacity)
    live: list[tuple[int, Part]] = []
    for _ in range(250):
        frees = 1 if live and random.random() < 0.45 else 0
        if not frees:
            size = random.choice([random.randint(1, 4096), random.randint(1, 3 * MIB), random.randint(1, 40 * MIB)])
            address, part = fast.malloc(size), slow.malloc(size)
            assert (address is None) == (part is None)
            if address is not None and part is not None:
                live.append((address, part))
            else:
                frees = random.randint(0, len(live))
        for _ in range(frees):
            address, part = live.pop(random.randrange(len(live)))
            fast.free(address)
            slow.free(part)
        if random.random() < 0.01:
            fast.release_cached()
            slow.release_cached()
        _assert_same(fast, slow)


@settings(max_examples=examples(200))
@given(columns(), allocator_settings_values(), _CAPACITIES)
def test_books_and_blocks_agree_and_the_capacity_holds(
    events: tuple[list[int], list[int]], allocator_settings: AllocatorSettings, capacity: int | None
) -> None:
    allocator = CachingAllocator(allocator_settings, capacity)
    address_of: dict[int, int] = {}
    for block, delta in zip(*events, strict=True):
        if delta > 0:
            address = allocator.malloc(delta)
            if address is None:
                assert capacity is not None
                break
            address_of[block] = address
        else:
            allocator.free(address_of.pop(block))
        segments = segments_of(allocator)
        blocks = [block for segment in segments for block in segment.blocks]
        assert all(one.address + one.size_bytes <= two.address for one, two in pairwise(blocks))
        assert sorted(b.address for b in blocks if b.is_allocated) == sorted(address_of.values())
        assert allocator.allocated_bytes == sum(b.size_bytes for b in blocks if b.is_allocated)
        assert allocator.reserved_bytes == sum(segment.size_bytes for segment in segments)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert capacity is None or allocator.reserved_bytes <= capacity
    for address in address_of.values():
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    assert all(len(segment.blocks) == 1 for segment in segments_of(allocator)), "with all freed each is whole"
    allocator.release_cached()
    assert (allocator.reserved_bytes, segments_of(allocator)) == (0, ())


@settings(max_examples=examples(150))
@given(columns(), allocator_settings_values(), st.integers(0, 50 * MIB))
def test_a_capacity_that_refuses_nothing_changes_nothing(
    events: tuple[list[int], list[int]], allocator_settings: AllocatorSettings, more: int
) -> None:
    plain = dataclasses.replace(allocator_settings, gc_threshold=None)
    plenty = replay(*events, plain)
    assert plenty.asked_bytes >= plenty.peak_reserved_bytes
    assert replay(*events, plain, capacity_bytes=plenty.asked_bytes + more) == plenty
    if plenty.asked_bytes:
        assert replay(*events, plain, capacity_bytes=plenty.asked_bytes - 1) != plenty


def peak_requested(blocks: list[int], deltas: list[int]) -> int:
    sizes: dict[int, int] = {}
    most = 0
    for block, delta in zip(blocks, deltas, strict=True):
        sizes[block] = max(delta, 0)
        most = max(most, sum(sizes.values()))
    return most


@given(columns(), allocator_settings_values())
def test_it_survives_with_the_smallest_capacity_and_needs_no_more_than_is_reserved_with_plenty(
    events: tuple[list[int], list[int]], allocator_settings: AllocatorSettings
) -> None:
    tolerance = 2 * MIB
    plenty = replay(*events, allocator_settings)
    assert plenty == replay(*events, allocator_settings) and plenty.oom_event is None
    assert max(plenty.peak_allocated_bytes, plenty.fragmented_bytes) <= plenty.peak_reserved_bytes
    capacity = min_cap(*events, allocator_settings, tolerance_bytes=tolerance)
    for more in (0, tolerance):
        assert replay(*events, allocator_settings, capacity_bytes=capacity + more).oom_event is None
    assert capacity >= peak_requested(*events)
    if allocator_settings.gc_threshold is not None:
        return  # what was collected may have to be taken again, in a larger segment than the one that lay there
    # A page that is mapped beyond the request, and the check before it, may each ask for a page more.
    pages = 2 * allocator_settings.large_segment_bytes if allocator_settings.expandable_segments else 0
    assert capacity <= plenty.peak_reserved_bytes + pages + tolerance


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40), st.integers(0, 2**32))
def test_every_order_is_a_reordering(lengths: list[int], seed: int) -> None:
    orders = sequences(lengths, seed=seed)
    assert orders == sequences(lengths, seed=seed)
    assert all(sorted(order) == sorted(lengths) for order in orders)
