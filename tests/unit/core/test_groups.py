"""Devices that a trial takes together, by name."""

import pytest

from dryfit.settings.devices import (
    check_enough,
    cpu_of,
    devices_of,
    left_over,
    most_on_a_node,
    node_of,
    on_cpu,
    overlap,
    place_in_words,
    place_of,
    place_on,
    places_of,
    visible_devices,
    with_node,
)
from dryfit.settings.errors import MachineError


def test_a_place_is_named_by_its_devices() -> None:
    assert place_of(["GPU-a", "GPU-b"]) == "GPU-a,GPU-b"
    assert devices_of("GPU-a,GPU-b") == ("GPU-a", "GPU-b")
    assert devices_of(place_of(["3"])) == ("3",)
    assert (place_in_words("3"), place_in_words("3,1")) == ("device 3", "devices 3, 1")
    assert overlap("0,1", "1,2") and overlap("0", "0") and overlap("here/cpu", "here/cpu")
    assert not overlap("0,1", "2,3") and not overlap("1", "11") and not overlap("here/cpu", "here/0")
    assert not overlap("n1/cpu", "n2/cpu") and not overlap("n1/0,n1/1", "n2/0,n2/1")


@pytest.mark.parametrize(
    ("place", "node", "visible", "words"),
    [
        ("here/0", "here", "0", "device 0"),
        ("here/GPU-a,here/GPU-b", "here", "GPU-a,GPU-b", "devices GPU-a, GPU-b"),
        ("n1/3,n1/1", "n1", "3,1", "devices n1/3, n1/1"),
        ("n1/MIG-GPU-a/1/0", "n1", "MIG-GPU-a/1/0", "device n1/MIG-GPU-a/1/0"),
        ("here/cpu", "here", None, "the CPU"),
        ("n1/cpu", "n1", None, "the CPU of n1"),
    ],
)
def test_a_place_names_its_node_and_a_child_sees_only_the_devices(
    place: str, node: str, visible: str | None, words: str
) -> None:
    assert (node_of(place), visible_devices(place), place_in_words(place)) == (node, visible, words)
    assert (cpu_of(node) if visible is None else place_on(node, visible)) == place
    assert on_cpu(place) is (visible is None)
    assert with_node(place) == place


def test_places_of_older_ledgers_are_those_of_this_machine() -> None:
    assert with_node("0,1") == "here/0,here/1"
    assert with_node("MIG-GPU-a/1/0") == "here/MIG-GPU-a/1/0"


def test_neighbours_come_together_and_the_rest_is_idle() -> None:
    assert places_of("01234", 2) == ["0,1", "2,3"]
    assert left_over("01234", 2) == ("4",)
    assert left_over("0123", 2) == ()


def test_a_group_stays_within_a_node() -> None:
    devices = ("n1/0", "n1/1", "n1/2", "n2/0")
    assert places_of(devices, 2) == ["n1/0,n1/1"]
    assert left_over(devices, 2) == ("n1/2", "n2/0")
    assert places_of(devices, 2, set_aside={"n1/1"}) == ["n1/0,n1/2"]
    assert most_on_a_node(devices) == 3 and most_on_a_node(()) == 0


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
