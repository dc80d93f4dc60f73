"""Hypothesis strategies of allocations and of settings of the allocator."""

from hypothesis import strategies as st

from dryfit.gpu.allocator_settings import INTERVALS, MIB, AllocatorSettings

_SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(500 * 1024, 3 * MIB),
    st.integers(1, 40 * MIB),
    st.sampled_from([1, 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB, 20 * MIB, 33 * MIB]),
)


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Columns of events: a size allocates the next block; an index frees one of those in use."""
    blocks: list[int] = []
    deltas: list[int] = []
    live: list[int] = []
    count = 0
    for size, pick in draw(
        st.lists(st.tuples(st.one_of(st.none(), _SIZES, _SIZES), st.integers(0, 10**6)), max_size=60)
    ):
        if size is not None:
            blocks.append(count)
            deltas.append(size)
            live.append(count)
            count += 1
        elif live:
            block = live.pop(pick % len(live))
            blocks.append(block)
            deltas.append(-deltas[blocks.index(block)])
    return blocks, deltas


@st.composite
def allocator_settings_values(draw: st.DrawFn) -> AllocatorSettings:
    """Any that torch accepts."""
    large = draw(st.sampled_from([20, 20, 12, 64])) * MIB
    return AllocatorSettings(
        expandable_segments=draw(st.booleans()),
        max_split_bytes=draw(st.sampled_from([None, None, large, large + 8 * MIB])),
        roundup_power2_divisions=draw(
            st.sampled_from([(0,) * INTERVALS, (0,) * INTERVALS, (8,) * INTERVALS, (1, 2, 4, 16) + (8,) * 12])
        ),
        gc_threshold=draw(st.sampled_from([None, None, 0.3, 0.8])),
        large_segment_bytes=large,
        max_non_split_rounding_bytes=draw(st.sampled_from([large, 2 * large])),
    )
