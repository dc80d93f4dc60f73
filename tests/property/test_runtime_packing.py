"""Packing: never over a device's capacity, alone where it must be, nobody left waiting for ever, always the same."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from dryfit.runtime.packing import (
    BYPASSED_MOST,
    CPU,
    DeviceRoom,
    Fit,
    Hindrance,
    House,
    Limit,
    Need,
    Occupant,
    no_device_left,
    pack,
)

GIB = 2**30
CAPACITY = 10


@st.composite
def need(draw: st.DrawFn, number: int) -> Need:
    """A trial that fits an empty device."""
    shared = draw(st.one_of(st.none(), st.integers(1, CAPACITY)))
    alone = None if shared is None else draw(st.integers(1, shared))
    avoid = draw(st.frozensets(st.sampled_from("01"), max_size=2))
    return Need(number, shared, alone, exclusive=draw(st.integers(0, 3)) == 0, avoid=avoid)


@st.composite
def needs(draw: st.DrawFn, count: int) -> list[Need]:
    return [draw(need(number)) for number in range(count)]


@dataclass
class Machine:
    """Devices on which trials start as packing says, and end in any order."""

    devices: tuple[str, ...]
    waiting: list[Need]
    running: dict[int, tuple[Need, str | None]] = field(default_factory=dict)
    bypassed: dict[int, int] = field(default_factory=dict)
    neighbours: dict[str, int] = field(default_factory=dict)

    def house(self) -> House:
        rooms = [DeviceRoom(name, CAPACITY, self.neighbours.get(name, 0)) for name in self.devices]
        occupants = [Occupant(n, device, one.shared_bytes, one.exclusive) for n, (one, device) in self.running.items()]
        return House(rooms, occupants, bypassed=dict(self.bypassed))

    def step(self) -> Fit | Hindrance | None:
        """Let packing choose, check what it chose, and start it."""
        house = self.house()
        found = pack(self.waiting, house)
        assert found == pack(list(self.waiting), self.house())
        if not isinstance(found, Fit):
            return found
        one = next(waiting for waiting in self.waiting if waiting.number == found.number)
        there = house.on(found.device)
        assert not (there and one.exclusive) and not any(other.exclusive for other in there)
        assert found.device not in one.avoid or one.avoid >= set(self.devices)
        taken = (one.shared_bytes if there else one.alone_bytes) or 0
        if one.shared_bytes is not None:
            held = house.taken_bytes(found.device) + self.neighbours.get(str(found.device), 0)
            assert taken + held <= CAPACITY
        for other in self.waiting:
            if other.number < one.number:
                self.bypassed[other.number] = self.bypassed.get(other.number, 0) + 1
        self.waiting.remove(one)
        self.running[one.number] = one, found.device
        return found


@given(needs(14), st.sampled_from([("0",), ("0", "1")]), st.data())
def test_every_trial_runs_within_the_capacity_and_none_is_passed_for_ever(
    waiting: list[Need], devices: tuple[str, ...], data: st.DataObject
) -> None:
    machine = Machine(devices, waiting)
    for _ in range(200):
        if isinstance(machine.step(), Fit):
            continue
        if not machine.running:
            break
        del machine.running[data.draw(st.sampled_from(sorted(machine.running)))]
    assert not machine.waiting
    # Once its time is up a trial is kept a device; those that were overdue before it may still go first.
    assert all(count <= BYPASSED_MOST + len(devices) + 14 for count in machine.bypassed.values())


@given(st.integers(2, CAPACITY), st.integers(1, 4), st.data())
def test_a_stream_of_small_trials_keeps_a_large_one_waiting_only_so_long(
    large: int, small: int, data: st.DataObject
) -> None:
    machine = Machine(("0",), [])
    machine.running = {100: (Need(100, 1, 1), "0")}
    machine.waiting = [Need(0, CAPACITY, large), *(Need(number, small, small) for number in range(1, 40))]
    started = 0
    while any(one.number == 0 for one in machine.waiting):
        if isinstance(machine.step(), Fit):
            started += 1
        else:
            assert machine.running, "nothing runs, and the large one was not started"
            del machine.running[data.draw(st.sampled_from(sorted(machine.running)))]
    assert started <= BYPASSED_MOST + 1


@given(needs(6), st.integers(0, CAPACITY))
def test_neighbours_are_subtracted_and_waited_for(waiting: list[Need], held: int) -> None:
    machine = Machine(("0",), waiting, neighbours={"0": held})
    while isinstance(found := machine.step(), Fit):
        machine.running.clear()
    assert found is None or found.limit is Limit.NEIGHBOUR
    machine.neighbours.clear()
    while isinstance(found := machine.step(), Fit):
        machine.running.clear()
    assert found is None and not machine.waiting


SHARING = House((DeviceRoom("0", 24 * GIB, 2 * GIB),), (Occupant(3, "0", 9 * GIB),))


def test_the_reasons_are_told_with_numbers() -> None:
    found = pack([Need(5, 14 * GIB, 13 * GIB)], SHARING)
    assert isinstance(found, Hindrance) and found.limit is Limit.DEVICE_MEMORY
    assert found.text == (
        "trial 5 needs 14.0 GiB of device 0, which has 24.0 GiB, 9.0 GiB of them planned for trial 3, "
        "2.0 GiB of them held by others"
    )
    held = House((DeviceRoom("0", 24 * GIB, 20 * GIB),))
    found = pack([Need(5, 14 * GIB, 13 * GIB)], held)
    assert isinstance(found, Hindrance) and found.limit is Limit.NEIGHBOUR
    assert found.text == "trial 5 needs 13.0 GiB of device 0, which has 24.0 GiB, 20.0 GiB of them held by others"


def test_what_fits_beside_is_placed_beside() -> None:
    assert pack([Need(5, 13 * GIB, 13 * GIB)], SHARING) == Fit(5, "0")
    two = replace(SHARING, places=(*SHARING.places, DeviceRoom("1", 24 * GIB)))
    assert pack([Need(5, 13 * GIB, 13 * GIB)], two) == Fit(5, "1"), "the emptiest device first"
    assert pack([Need(5, 13 * GIB, 13 * GIB, avoid=frozenset("1"))], two) == Fit(5, "0")
    assert pack([Need(5, exclusive=True)], two) == Fit(5, "1")


def test_what_must_be_avoided_is_taken_where_nothing_else_is_left() -> None:
    assert pack([Need(5, 1, 1, avoid=frozenset("0"))], SHARING) == Fit(5, "0")


def test_a_device_that_waits_for_its_memory_takes_nobody() -> None:
    blocked = House((DeviceRoom("0", 24 * GIB, 0, "1.0 GiB are not back"),))
    found = pack([Need(5)], blocked)
    assert found == Hindrance(5, Limit.NOT_RETURNED, "1.0 GiB are not back")


def test_without_a_device_nothing_is_placed() -> None:
    found = pack([Need(5)], House((), set_aside=("0", "1")))
    assert found == Hindrance(5, Limit.SET_ASIDE, no_device_left(("0", "1")))
    assert "0, 1 set aside" in found.text


def test_the_host_bounds_all_but_the_first() -> None:
    one = Need(5, host_bytes=4 * GIB)
    busy = House((CPU,), (Occupant(3, None),), host_room_bytes=3 * GIB)
    found = pack([one], busy)
    assert isinstance(found, Hindrance) and found.limit is Limit.HOST_MEMORY
    assert "trial 5 takes 4.0 GiB of the host's memory, which has room for 3.0 GiB" in found.text
    assert pack([one], replace(busy, host_room_bytes=5 * GIB)) == Fit(5, None)
    assert pack([one], replace(busy, occupants=())) == Fit(5, None)
    unknown = replace(busy, host_room_bytes=9 * GIB, host_unknown="nobody knows")
    assert pack([one], unknown) == Hindrance(5, Limit.HOST_MEMORY, "nobody knows")
    assert pack([one], replace(unknown, occupants=())) == Fit(5, None)
