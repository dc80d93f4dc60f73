"""Devices that a trial takes together, by name."""

import pytest

from dryfit.core.errors import MachineError
from dryfit.core.sharding.device_groups import (
    check_enough,
    devices_of,
    left_over,
    overlap,
    place_in_words,
    place_of,
    places_of,
)


def test_a_place_is_named_by_its_devices() -> None:
    assert place_of(["GPU-a", "GPU-b"]) == "GPU-a,GPU-b"
    assert devices_of("GPU-a,GPU-b") == ("GPU-a", "GPU-b")
    assert devices_of(place_of(["3"])) == ("3",)
    assert (place_in_words("3"), place_in_words("3,1")) == ("device 3", "devices 3, 1")
    assert overlap("0,1", "1,2") and overlap("0", "0") and overlap(None, None)
    assert not overlap("0,1", "2,3") and not overlap("1", "11") and not overlap(None, "0")


def test_neighbours_come_together_and_the_rest_is_idle() -> None:
    assert places_of("01234", 2) == ["0,1", "2,3"]
    assert left_over("01234", 2) == ("4",)
    assert left_over("0123", 2) == ()


def test_what_is_left_of_broken_groups_comes_together() -> None:
    assert places_of("012345", 2, set_aside={"1"}) == ["2,3", "4,5"]
    assert places_of("012345", 2, set_aside={"1", "4"}) == ["0,5", "2,3"]
    assert left_over("012345", 2, set_aside={"1"}) == ("0",)


def test_where_trials_run_nothing_is_moved() -> None:
    assert places_of("012345", 2, taken=["2,3"]) == ["0,1", "2,3", "4,5"]
    # What is left of the group that a trial still runs on is free only once that has ended.
    assert places_of("012345", 2, set_aside={"1", "4"}, taken=["0,1", "2,3"]) == ["2,3"]
    assert places_of("012345", 2, set_aside={"1", "4"}, taken=["2,3"]) == ["0,5", "2,3"]
    # A group that was put together anew stays together, though its first order would be possible again.
    assert places_of("0123", 2, taken=["0,2"]) == ["0,2", "1,3"]


def test_too_few_devices_are_refused_in_words() -> None:
    check_enough(4, 4)
    check_enough(0, 1)
    with pytest.raises(MachineError) as caught:
        check_enough(1, 4)
    said = str(caught.value)
    assert "each of a trial's 4 processes a device of its own" in said and "there is 1 CUDA device(s)" in said
    assert "at most 1" in said and 'execution.device = "cpu"' in said
