"""Packing trials of different numbers of devices: none over a device's capacity, none left waiting for ever."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.packing import (
    BYPASSED_MOST,
    Allocation,
    Blocker,
    Cluster,
    DeviceCapacity,
    Fit,
    Limit,
    Need,
    group_capacity,
    pack,
)
from dryfit.settings.devices import devices_of, places_of

CAPACITY = 10


@st.composite
def need(draw: st.DrawFn, number: int, sizes: Sequence[int]) -> Need:
    """A trial that fits empty devices."""
    shared = draw(st.one_of(st.none(), st.integers(1, CAPACITY)))
    alone = None if shared is None else draw(st.integers(1, shared))
    exclusive = draw(st.integers(0, 3)) == 0
    return Need(number, shared, alone, exclusive=exclusive, device_count=draw(st.sampled_from(sizes)))


@dataclass
class Machine:
    """Devices on which trials of one device, and of several, start as packing says."""

    devices: tuple[str, ...]
    waiting: list[Need]
    running: dict[int, tuple[Need, str]] = field(default_factory=dict)
    bypassed: dict[int, int] = field(default_factory=dict)

    def capacities(self, size: int) -> list[DeviceCapacity]:
        taken = [place for _, place in self.running.values() if len(devices_of(place)) == size]
        places = places_of(self.devices, size, taken=taken)
        return [group_capacity(place, [DeviceCapacity(one, CAPACITY) for one in devices_of(place)]) for place in places]

    def cluster(self) -> Cluster:
        allocations = [
            Allocation(n, place, one.shared_bytes, one.exclusive) for n, (one, place) in self.running.items()
        ]
        other_places = {size: self.capacities(size) for size in (2, 4)}
        return Cluster(self.capacities(1), allocations, bypassed=dict(self.bypassed), other_places=other_places)

    def step(self) -> Fit | Blocker | None:
        found = pack(self.waiting, self.cluster())
        assert found == pack(list(self.waiting), self.cluster())
        if not isinstance(found, Fit):
            return found
        one = next(waiting for waiting in self.waiting if waiting.number == found.number)
        assert len(set(devices_of(found.place))) == one.device_count
        for other in self.waiting:
            if other.number < one.number:
                self.bypassed[other.number] = self.bypassed.get(other.number, 0) + 1
        self.waiting.remove(one)
        self.running[one.number] = one, found.place
        for device in devices_of(found.place):
            self.check(device)
        return found

    def check(self, device: str) -> None:
        there = [one for one, place in self.running.values() if device in devices_of(place)]
        assert len(there) == 1 or not any(one.exclusive for one in there), "a device of its own is shared"
        assert len(there) == 1 or sum(one.shared_bytes or 0 for one in there) <= CAPACITY


@given(st.sampled_from([2, 3, 4, 5]), st.data())
def test_trials_of_all_sizes_run_in_the_end_and_share_only_what_there_is(count: int, data: st.DataObject) -> None:
    sizes = [size for size in (1, 2, 4) if size <= count]
    waiting = [data.draw(need(number, sizes)) for number in range(14)]
    machine = Machine(tuple(map(str, range(count))), waiting)
    for _ in range(200):
        if isinstance(machine.step(), Fit):
            continue
        if not machine.running:
            break
        del machine.running[data.draw(st.sampled_from(sorted(machine.running)))]
    assert not machine.waiting
    assert all(passed <= BYPASSED_MOST + count + 14 for passed in machine.bypassed.values())


@given(st.data())
def test_a_stream_of_small_trials_keeps_a_group_waiting_only_so_long(data: st.DataObject) -> None:
    """On either device one trial runs at any time, until both are kept for the trial that needs both."""
    machine = Machine(("0", "1"), [])
    machine.running = {100: (Need(100, 6, 6, device_count=1), "0"), 101: (Need(101, 6, 6, device_count=1), "1")}
    large = Need(0, CAPACITY, CAPACITY, device_count=2)
    machine.waiting = [large, *(Need(number, 6, 6, device_count=1) for number in range(1, 40))]
    started = 0
    while any(one.number == 0 for one in machine.waiting):
        if isinstance(machine.step(), Fit):
            started += 1
        else:
            assert machine.running, "nothing runs, and the large one was not started"
            del machine.running[data.draw(st.sampled_from(sorted(machine.running)))]
    assert started <= BYPASSED_MOST + 1


def test_a_group_is_as_full_as_its_fullest_device() -> None:
    capacities = {2: [DeviceCapacity("0,1", CAPACITY)]}
    cluster = Cluster(
        [DeviceCapacity("0", CAPACITY), DeviceCapacity("1", CAPACITY)],
        [Allocation(3, "0", 6), Allocation(4, "1", 2)],
        other_places=capacities,
    )
    assert cluster.taken_bytes("0,1") == 6
    assert pack([Need(5, 4, 4, device_count=2)], cluster) == Fit(5, "0,1")
    found = pack([Need(5, 5, 5, device_count=2)], cluster)
    assert isinstance(found, Blocker) and found.limit is Limit.DEVICE_MEMORY
    assert found.text.startswith("trial 5 needs 0 MiB of each of devices 0, 1")
    assert pack([Need(5, 5, 5, device_count=1)], cluster) == Fit(5, "1")
    few = replace(cluster, other_places={2: ()}, set_aside=("0",))
    found = pack([Need(5, 1, 1, device_count=2)], few)
    assert isinstance(found, Blocker) and found.limit is Limit.SET_ASIDE
    assert found.text == "fewer than the 2 devices of a trial are left to run on: 0 set aside"
