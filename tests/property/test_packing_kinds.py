"""Packing trials on devices of several kinds: each on one that it has a need for, none over capacity, all at last."""

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
