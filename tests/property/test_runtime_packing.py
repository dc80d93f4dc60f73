"""Packing: never over a device's capacity, alone where it must be, nobody left waiting for ever, always the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.packing import (
    BYPASSED_MOST,
    CPU,
    Allocation,
    Blocker,
    Cluster,
    DeviceCapacity,
    Fit,
    Limit,
    Need,
    group_capacity,
    no_device_left,
    pack,
)
from dryfit.settings.devices import HERE, cpu_of, devices_of, left_over, node_of, places_of

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


SHARING = Cluster((DeviceCapacity("0", 24 * GIB, 2 * GIB),), (Allocation(3, "0", 9 * GIB),))


def test_the_reasons_are_told_with_numbers() -> None:
    found = pack([Need(5, 14 * GIB, 13 * GIB)], SHARING)
    assert isinstance(found, Blocker) and found.limit is Limit.DEVICE_MEMORY
    assert found.text == (
        "trial 5 needs 14.0 GiB of device 0, which has 24.0 GiB, 9.0 GiB of them planned for trial 3, "
        "2.0 GiB of them held by others"
    )
    held = Cluster((DeviceCapacity("0", 24 * GIB, 20 * GIB),))
    found = pack([Need(5, 14 * GIB, 13 * GIB)], held)
    assert isinstance(found, Blocker) and found.limit is Limit.NEIGHBOUR
    assert found.text == "trial 5 needs 13.0 GiB of device 0, which has 24.0 GiB, 20.0 GiB of them held by others"


def test_what_fits_beside_is_placed_beside() -> None:
    assert pack([Need(5, 13 * GIB, 13 * GIB)], SHARING) == Fit(5, "0")
    two = replace(SHARING, places=(*SHARING.places, DeviceCapacity("1", 24 * GIB)))
    assert pack([Need(5, 13 * GIB, 13 * GIB)], two) == Fit(5, "1"), "the emptiest device first"
    assert pack([Need(5, 13 * GIB, 13 * GIB, avoid=frozenset("1"))], two) == Fit(5, "0")
    assert pack([Need(5, exclusive=True)], two) == Fit(5, "1")


def test_one_that_fits_goes_before_one_that_does_not_until_that_one_is_overdue() -> None:
    large, small = Need(5, 24 * GIB, 22 * GIB), Need(6, GIB, GIB)
    assert pack([large, small], SHARING) == Fit(6, "0")
    found = pack([large, small], replace(SHARING, bypassed={5: BYPASSED_MOST}))
    assert isinstance(found, Blocker) and found.number == 5


def test_what_must_be_avoided_is_taken_where_nothing_else_is_left() -> None:
    assert pack([Need(5, 1, 1, avoid=frozenset("0"))], SHARING) == Fit(5, "0")


def test_a_device_that_waits_for_its_memory_takes_nobody() -> None:
    blocked = Cluster((DeviceCapacity("0", 24 * GIB, 0, "1.0 GiB are not back"),))
    found = pack([Need(5)], blocked)
    assert found == Blocker(5, Limit.NOT_RETURNED, "1.0 GiB are not back")


def test_without_a_device_nothing_is_placed() -> None:
    found = pack([Need(5)], Cluster((), set_aside=("0", "1")))
    assert found == Blocker(5, Limit.SET_ASIDE, no_device_left(("0", "1")))
    assert "0, 1 set aside" in found.text


def test_the_host_bounds_all_but_the_first() -> None:
    one = Need(5, host_bytes=4 * GIB)
    busy = Cluster((CPU,), (Allocation(3, CPU.place),), host_free_bytes={HERE: 3 * GIB})
    found = pack([one], busy)
    assert isinstance(found, Blocker) and found.limit is Limit.HOST_MEMORY
    assert "trial 5 takes 4.0 GiB of the host's memory, which has room for 3.0 GiB" in found.text
    assert pack([one], replace(busy, host_free_bytes={HERE: 4 * GIB})) == Fit(5, CPU.place)
    assert pack([one], replace(busy, allocations=(), host_free_bytes={})) == Fit(5, CPU.place)
    unknown = replace(busy, host_free_bytes={HERE: 9 * GIB}, host_unknown="nobody knows")
    assert pack([one], unknown) == Blocker(5, Limit.HOST_MEMORY, "nobody knows")
    assert pack([one], replace(unknown, allocations=(), host_free_bytes={})) == Fit(5, CPU.place)


# ---- groups of devices


@dataclass
class Groups:
    """Devices of which each trial takes ``device_count``, and which may be set aside at any time."""

    devices: tuple[str, ...]
    device_count: int
    waiting: list[Need]
    running: dict[int, tuple[Need, str]] = field(default_factory=dict)
    neighbours: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    aside: dict[str, str] = field(default_factory=dict)

    def cluster(self) -> Cluster:
        taken = [place for _, place in self.running.values()]
        places = places_of(self.devices, self.device_count, set_aside=self.aside, taken=taken)
        capacities = [
            group_capacity(
                place, [DeviceCapacity(one, self.sizes[one], self.neighbours[one]) for one in devices_of(place)]
            )
            for place in places
        ]
        allocations = [
            Allocation(n, place, one.shared_bytes, one.exclusive) for n, (one, place) in self.running.items()
        ]
        return Cluster(capacities, allocations, tuple(self.aside), default_devices=self.device_count)

    def step(self) -> Fit | Blocker | None:
        found = pack(self.waiting, self.cluster())
        if isinstance(found, Fit):
            one = next(waiting for waiting in self.waiting if waiting.number == found.number)
            chosen = devices_of(found.place)
            assert len(set(chosen)) == self.device_count and set(chosen) <= set(self.devices) - set(self.aside)
            self.waiting.remove(one)
            self.running[one.number] = one, found.place
            self.check(chosen)
        return found

    def check(self, chosen: tuple[str, ...]) -> None:
        for device in chosen:
            there = [one for one, place in self.running.values() if device in devices_of(place)]
            assert len(there) == 1 or not any(one.exclusive for one in there), "a device of its own is shared"
            planned = sum(one.shared_bytes or 0 for one in there)
            if len(there) > 1 and all(one.shared_bytes is not None for one in there):
                assert planned + self.neighbours[device] <= self.sizes[device]


@given(needs(10), st.integers(1, 7), st.integers(1, 4), st.data())
def test_no_device_is_in_two_groups_where_one_trial_must_be_alone(
    waiting: list[Need], count: int, device_count: int, data: st.DataObject
) -> None:
    devices = tuple(str(index) for index in range(count))
    held = {device: data.draw(st.sampled_from([0, 0, 0, 1])) for device in devices}
    sizes = {device: CAPACITY + data.draw(st.integers(0, 2)) for device in devices}
    machine = Groups(devices, device_count, [replace(one, exclusive=one.number % 2 == 0) for one in waiting])
    machine.neighbours, machine.sizes = held, sizes
    for _ in range(120):
        if data.draw(st.integers(0, 9)) == 0:
            machine.aside[data.draw(st.sampled_from(devices))] = "lost"
        if isinstance(machine.step(), Fit) and data.draw(st.booleans()):
            continue
        if machine.running:
            del machine.running[data.draw(st.sampled_from(sorted(machine.running)))]
        elif not machine.waiting or count - len(machine.aside) < device_count:
            break
    if machine.waiting and not machine.running:
        found = machine.step()
        assert isinstance(found, Blocker)
        few_left = count - len(machine.aside) < device_count
        limit = (Limit.SET_ASIDE if machine.aside else Limit.NO_NODE) if few_left else Limit.NEIGHBOUR
        assert found.limit is limit, found


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_places_have_no_device_in_common_and_use_all_that_can_be_used(
    count: int, size: int, data: st.DataObject
) -> None:
    devices = tuple(f"GPU-{index}" for index in range(count))
    aside = data.draw(st.frozensets(st.sampled_from(devices)))
    before = places_of(devices, size, set_aside=data.draw(st.frozensets(st.sampled_from(sorted(devices)))))
    taken = data.draw(st.lists(st.sampled_from(before), unique=True)) if before else []
    places = places_of(devices, size, set_aside=aside, taken=taken)
    used = [device for place in places for device in devices_of(place)]
    assert len(used) == len(set(used)) == size * len(places) and not aside & set(used)
    assert all(len(devices_of(place)) == size for place in places)
    busy = {device for place in taken for device in devices_of(place)}
    for place in taken:
        assert (place in places) is not (bool(aside & set(devices_of(place))))
    assert all(place in taken or busy.isdisjoint(devices_of(place)) for place in places)
    free = [device for device in devices if device not in busy | aside]
    assert sum(place not in taken for place in places) == len(free) // size
    idle = left_over(devices, size, set_aside=aside)
    assert len(idle) == (count - len(aside)) % size and aside.isdisjoint(idle)
    if size == 1:
        assert places == [device for device in devices if device not in aside], "one device: as ever"


@given(needs(12), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.data())
def test_each_node_bounds_its_own_trials(waiting: list[Need], mosts: list[int], data: st.DataObject) -> None:
    """By their number and by its host memory; a trial that no node has room for waits, and no other node helps it."""
    waiting = [replace(one, host_bytes=data.draw(st.integers(1, 4)), avoid=frozenset()) for one in waiting]
    most = {f"n{index}": count for index, count in enumerate(mosts)}
    free = {node: data.draw(st.integers(0, 9)) for node in most if data.draw(st.booleans())}
    running: list[Allocation] = []
    while True:
        on = {node: [one for one in running if node_of(one.place) == node] for node in most}
        full = [node for node, there in on.items() if len(there) >= most[node]]
        cluster = Cluster([DeviceCapacity(cpu_of(node)) for node in most], running, (), dict(free), full=full)
        found = pack(waiting, cluster)
        if not isinstance(found, Fit):
            break
        (one,) = [waits for waits in waiting if waits.number == found.number]
        node = node_of(found.place)
        assert node not in full and not any(other.exclusive for other in on[node])
        assert not (one.exclusive and on[node]), "it must be alone on its node's CPU"
        assert node not in free or free[node] >= (one.host_bytes or 0)
        if node in free:
            free[node] -= one.host_bytes or 0
        waiting.remove(one)
        running.append(Allocation(one.number, found.place, None, one.exclusive))
    assert found is None or found.limit in (Limit.ASKED, Limit.HOST_MEMORY, Limit.EXCLUSIVE)
    assert all(len([one for one in running if node_of(one.place) == node]) <= most[node] for node in most)


def test_the_reason_names_the_node() -> None:
    one, two = cpu_of("n1"), cpu_of("n2")
    busy = Cluster((DeviceCapacity(one), DeviceCapacity(two)), (Allocation(3, two), Allocation(4, one)), full=["n1"])
    assert pack([Need(5)], busy) == Fit(5, two)
    assert pack([Need(5)], replace(busy, full=["n1", "n2"])) == Blocker(
        5, Limit.ASKED, "as many trials run on node n1 as may run there"
    )
    found = pack([Need(5, host_bytes=4 * GIB)], replace(busy, host_free_bytes={"n2": 3 * GIB}, full=()))
    assert found == Fit(5, one), "the other has room"
    found = pack([Need(5, host_bytes=4 * GIB)], replace(busy, host_free_bytes={"n1": 0, "n2": 3 * GIB}, full=["n1"]))
    assert isinstance(found, Blocker) and found.limit is Limit.ASKED
    found = pack([Need(5, host_bytes=4 * GIB)], replace(busy, host_free_bytes={"n1": 0, "n2": 3 * GIB}, full=()))
    assert isinstance(found, Blocker) and found.limit is Limit.HOST_MEMORY
    assert found.text == "trial 5 takes 4.0 GiB of the memory of node n1, which has room for 0 MiB"


def test_a_group_is_avoided_for_any_of_its_devices() -> None:
    cluster = Cluster([DeviceCapacity("0,1"), DeviceCapacity("2,3")], default_devices=2)
    assert pack([Need(5, avoid=frozenset({"1"}))], cluster) == Fit(5, "2,3")
    assert pack([Need(5, avoid=frozenset({"1", "2"}))], cluster) == Fit(5, "0,1"), "nothing else is left"


def test_with_too_few_devices_for_a_group_nothing_is_placed() -> None:
    found = pack([Need(5)], Cluster((), set_aside=("1",), default_devices=2))
    assert isinstance(found, Blocker) and found.limit is Limit.SET_ASIDE
    assert found.text == "fewer than the 2 devices of a trial are left to run on: 1 set aside"


# ---- Packing trials of different numbers of devices: none over a device's capacity, none left waiting for ever


@st.composite
def mixed_need(draw: st.DrawFn, number: int, sizes: Sequence[int]) -> Need:
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
    waiting = [data.draw(mixed_need(number, sizes)) for number in range(14)]
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
