"""Packing trials on devices of several kinds: each on one that it has a need for, none over capacity, all at last."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.packing import Allocation, Blocker, Cluster, DeviceCapacity, Fit, Limit, Need, pack
from dryfit.settings.memory_terms import DeviceSpec

KINDS = [DeviceSpec(name=name, capacity_bytes=size) for name, size in (("small", 4), ("middle", 8), ("large", 16))]


@st.composite
def needs(draw: st.DrawFn, number: int) -> list[Need]:
    """The needs of a trial on one kind of device or on several, smallest first; each fits an empty device of it."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    sizes = [draw(st.integers(1, kind.capacity_bytes)) for kind in kinds]
    exclusive = draw(st.integers(0, 3)) == 0
    found = [Need(number, size, size, exclusive, kind=kind) for kind, size in zip(kinds, sizes, strict=True)]
    return sorted(found, key=lambda need: need.kind.capacity_bytes if need.kind else 0)


def places(counts: list[int]) -> list[DeviceCapacity]:
    """So many devices of each kind."""
    of_each = [
        (kind, f"{kind.name}/{index}") for kind, count in zip(KINDS, counts, strict=True) for index in range(count)
    ]
    return [DeviceCapacity(place, kind.capacity_bytes, kind=kind) for kind, place in of_each]


@given(st.data(), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_every_trial_runs_on_a_kind_of_its_own_and_those_whose_kind_is_not_there_wait(
    data: st.DataObject, counts: list[int]
) -> None:
    waiting = {number: data.draw(needs(number)) for number in range(10)}
    there = places(counts)
    kinds = {place.kind for place in there}
    possible = {number for number, every in waiting.items() if any(need.kind in kinds for need in every)}
    running: dict[int, tuple[Need, str]] = {}
    bypassed: dict[int, int] = {}
    ended: set[int] = set()
    for _ in range(200):
        allocations = [Allocation(n, place, one.shared_bytes, one.exclusive) for n, (one, place) in running.items()]
        cluster = Cluster(there, allocations, bypassed=dict(bypassed))
        found = pack([need for every in waiting.values() for need in every], cluster)
        if isinstance(found, Fit):
            (need,) = [one for one in waiting.pop(found.number) if one.kind == found.kind]
            (place,) = [one for one in there if one.place == found.place]
            beside = [one for one, other in running.values() if other == found.place]
            assert place.kind == need.kind, "it runs by the need of the device that it got"
            assert sum(one.shared_bytes or 0 for one in (need, *beside)) <= (place.capacity_bytes or 0)
            assert not (beside and (need.exclusive or any(one.exclusive for one in beside)))
            for number in waiting:
                bypassed[number] = bypassed.get(number, 0) + (number < found.number)
            running[found.number] = need, found.place
        elif running:
            number = data.draw(st.sampled_from(sorted(running)))
            del running[number]
            ended.add(number)
        else:
            break
    assert ended == possible, "all that can run have run, and nothing else"
    left = pack([need for every in waiting.values() for need in every], Cluster(there))
    assert (left is None) == (not waiting)
    assert left is None or (isinstance(left, Blocker) and left.limit is Limit.NO_NODE)


def test_the_emptiest_device_of_any_kind_and_of_equals_the_smallest() -> None:
    small, _, large = KINDS
    alternatives = [Need(5, 3, 3, kind=small), Need(5, 6, 6, kind=large)]
    two = places([1, 0, 1])
    assert pack(alternatives, Cluster(two)) == Fit(5, "small/0", small)
    busy = Cluster(two, [Allocation(1, "small/0", 1)])
    assert pack(alternatives, busy) == Fit(5, "large/0", large), "an empty device comes before a shared one"
    assert pack([replace(alternatives[0], number=6)], busy) == Fit(6, "small/0", small)


def test_a_trial_whose_kind_is_not_there_says_what_it_waits_for() -> None:
    small, middle, _ = KINDS
    wants, small_one = Need(5, 6, 6, kind=middle), Need(6, 1, 1, kind=small)
    found = pack([wants], Cluster(places([2, 0, 0])))
    assert isinstance(found, Blocker) and found.limit is Limit.NO_NODE
    assert found.text == "trial 5 waits for a device like middle (0 MiB), and no node that is there has one"
    assert pack([wants, small_one], Cluster(places([1, 0, 0]))) == Fit(6, "small/0", small)
