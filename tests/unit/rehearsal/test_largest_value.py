"""The search for the largest value that fits, against a scan of all values."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.largest_value import LargestValue, TriedValue, ValueEnd, found, next_value

GIB = 2**30
MOST = 40


def searched(own: int, needs: Callable[[int], int | None], capacity_bytes: int) -> LargestValue:
    """Search with arithmetic in place of rehearsals; None is a script that fails by itself."""
    tried: dict[int, TriedValue] = {}
    while (value := next_value("--rows", own, tried, capacity_bytes)) is not None:
        assert value not in tried and value >= 1 and len(tried) < MOST
        needed = needs(value)
        if needed is None:
            tried[value] = TriedValue(value, ValueEnd.UNKNOWN, reason="ValueError")
        else:
            end = ValueEnd.FITS if needed <= capacity_bytes else ValueEnd.SHORT
            tried[value] = TriedValue(value, end, needed, needed)
    return found("--rows", parse_device("24GiB"), tried)


@given(
    own=st.integers(1, 300),
    fixed=st.integers(0, 100),
    linear=st.integers(1, 50),
    square=st.integers(0, 3),
    step=st.integers(1, 20),
    capacity=st.integers(1, 20_000),
)
def test_it_is_what_a_scan_finds(own: int, fixed: int, linear: int, square: int, step: int, capacity: int) -> None:
    def needs(value: int) -> int:
        return (fixed + linear * value + square * value * value) // step * step + value

    seen = searched(own, needs, capacity)
    scan = next(value for value in range(1, 30_000) if needs(value) > capacity)
    assert (seen.largest.value if seen.largest else 0) == scan - 1
    assert seen.following is not None and seen.following.value == scan and seen.following.end is ValueEnd.SHORT
    assert seen.is_known is (scan > 1)


def test_values_that_need_the_same_segments_are_no_end() -> None:
    # The allocator takes whole segments: what is required grows in steps, what is allocated with each unit.
    tried: dict[int, TriedValue] = {}
    while (value := next_value("--rows", 8, tried, 24 * GIB)) is not None:
        needed = 20 * GIB + value // 100 * GIB
        end = ValueEnd.FITS if needed <= 24 * GIB else ValueEnd.SHORT
        tried[value] = TriedValue(value, end, needed, value)
    seen = found("--rows", parse_device("24GiB"), tried)
    assert seen.largest is not None and seen.largest.value == 499 and seen.is_known


@pytest.mark.parametrize(("own", "capacity"), [(8, 24 * GIB), (200, 24 * GIB), (1, 80 * GIB)])
def test_where_memory_is_linear_a_few_values_are_enough(own: int, capacity: int) -> None:
    assert len(searched(own, lambda value: 2 * GIB + value * GIB // 4, capacity).tried) <= 6


def test_a_script_that_fails_at_larger_values_does_not_run_out_of_memory_there() -> None:
    seen = searched(8, lambda value: value * GIB // 4 if value <= 33 else None, 24 * GIB)
    assert (seen.largest.value, seen.following.value, seen.following.end) == (33, 34, ValueEnd.UNKNOWN)
    assert not seen.is_known and seen.following.reason == "ValueError"


def test_where_memory_grows_no_more_nothing_is_too_large() -> None:
    seen = searched(8, lambda value: min(value, 64) * GIB // 8, 24 * GIB)
    assert seen.is_known and seen.following is None


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (lambda value: GIB, "it ignores --rows"),
        (lambda value: 30 * GIB, "it ignores --rows"),
        (lambda value: 20 * GIB - value * GIB // 8, "16 takes less than 8"),
        (lambda value: 30 * GIB - value * GIB // 8, "takes less than"),
    ],
)
def test_what_has_no_largest_value_is_refused(needs: Callable[[int], int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        searched(8, needs, 24 * GIB)
