"""Which waiting trial gets which device, by planned memory. Pure.

A trial of several processes gets a group of devices: one place (:mod:`dryfit.core.sharding.device_groups`), whose room
is that of the device with the least; what trials are counted with there is what each of their processes takes of its
own device.

Trials come lowest number first. One that does not fit beside those that run may be passed by others that do, but only
so often: after that, a device is kept for it until it fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dryfit.core.sharding.device_groups import devices_of, overlap, place_in_words
from dryfit.core.text.units import gib
from dryfit.core.text.words import few

BYPASSED_MOST = 8
"""How many trials with higher numbers may start while one waits for room."""


class Limit(StrEnum):
    """What keeps more trials from running side by side."""

    ASKED = "asked"
    """As many run as were asked for, or as the machine's cores allow."""
    DEVICE_MEMORY = "device_memory"
    NEIGHBOUR = "neighbour"
    """Others hold so much of the device that the trial would not fit even alone."""
    HOST_MEMORY = "host_memory"
    EXCLUSIVE = "exclusive"
    """A trial must be alone on its device."""
    KEPT = "kept"
    """A device is kept for a trial that has waited long enough."""
    NOT_RETURNED = "not_returned"
    """A process has ended, and what it took of the device is not back."""
    SET_ASIDE = "set_aside"


@dataclass(frozen=True, slots=True)
class Need:
    """What a waiting trial asks for.

    Attributes:
        number: The trial.
        shared_bytes: What each of its processes takes of a device that it shares; None: nobody knows, and it is not
            counted.
        alone_bytes: The least that it can do with where nothing of ours is beside it; None: not known.
        exclusive: It must be alone on its device.
        avoid: Devices it must not run on, as long as there are others.
        host_bytes: What it takes of the host; None: not known.
        device_count: Devices that it takes; None: as many as most.
    """

    number: int
    shared_bytes: int | None = None
    alone_bytes: int | None = None
    exclusive: bool = False
    avoid: frozenset[str] = frozenset()
    host_bytes: int | None = None
    device_count: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """A trial that runs; ``needs_bytes`` is what it is counted with, None: it is not counted."""

    number: int
    device: str | None
    needs_bytes: int | None = None
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """A device that trials can run on.

    Attributes:
        device: Its name, or those of a group; None: the CPU.
        capacity_bytes: All of its memory; None: not counted.
        neighbour_bytes: What others hold of it.
        blocked: Why nothing more may start there now; empty: nothing keeps it.
    """

    device: str | None
    capacity_bytes: int | None = None
    neighbour_bytes: int = 0
    blocked: str = ""


CPU = DeviceCapacity(None)


def group_capacity(place: str, capacities: Sequence[DeviceCapacity]) -> DeviceCapacity:
    """A group of devices as one place: with the memory of that which neighbours leave the least of; blocked if one is.

    As trials take the same of each of its devices, what fits that one fits all.
    """
    counted = [(one.capacity_bytes, one.neighbour_bytes) for one in capacities if one.capacity_bytes is not None]
    capacity_bytes, neighbour_bytes = min(counted, key=lambda one: one[0] - one[1], default=(None, 0))
    return DeviceCapacity(
        place, capacity_bytes, neighbour_bytes, "; ".join(one.blocked for one in capacities if one.blocked)
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where trials can run, and who runs there.

    Attributes:
        places: Every device that is not set aside, or every group without one that is.
        allocations: The trials that run.
        set_aside: Devices that get no more trials.
        host_free_bytes: What can still be taken of the host's memory; None: not counted.
        host_unknown: Why nobody knows yet what a trial takes of the host; empty: it is known, or does not count.
        bypassed: How many trials have passed each waiting one.
        default_devices: Devices of a trial that asks for no other number.
        other_places: Places of other numbers of devices, for trials that take so many; their devices are those of
            ``places`` again.
    """

    places: Sequence[DeviceCapacity] = (CPU,)
    allocations: Sequence[Allocation] = ()
    set_aside: Sequence[str] = ()
    host_free_bytes: int | None = None
    host_unknown: str = ""
    bypassed: Mapping[int, int] = field(default_factory=dict[int, int])
    default_devices: int = 1
    other_places: Mapping[int, Sequence[DeviceCapacity]] = field(default_factory=dict[int, Sequence[DeviceCapacity]])

    def devices_for(self, need: Need) -> int:
        """How many devices a trial takes."""
        return self.default_devices if need.device_count is None else need.device_count

    def places_for(self, need: Need) -> Sequence[DeviceCapacity]:
        """The places that have as many devices as a trial takes; the CPU is one for any number."""
        if self.devices_for(need) == self.default_devices or CPU in self.places:
            return self.places
        return self.other_places.get(self.devices_for(need), ())

    def on(self, device: str | None) -> list[Allocation]:
        """The trials that run on a device, or on any of a group."""
        return [one for one in self.allocations if overlap(one.device, device)]

    def taken_bytes(self, device: str | None) -> int:
        """What the trials on a device are counted with; of a group, on that device which they take most of."""
        each = [device] if device is None else devices_of(device)
        return max(sum(one.needs_bytes or 0 for one in self.on(name)) for name in each)


@dataclass(frozen=True, slots=True)
class Fit:
    """A trial that can start, and where."""

    number: int
    device: str | None


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a trial cannot start now.

    Attributes:
        number: The trial.
        limit: What kind of reason it is.
        text: The reason, for a person.
    """

    number: int
    limit: Limit
    text: str


def pack(needs: Sequence[Need], cluster: Cluster) -> Fit | Blocker | None:
    """Choose the next trial to start, and its device.

    Args:
        needs: The trials that could start, by number.
        cluster: Where.

    Returns:
        What to start; else what keeps the first of them; None where none waits.
    """
    first: Blocker | None = None
    kept: dict[str | None, int] = {}
    for need in needs:
        blocker = _host(need, cluster)
        if blocker is None:
            placed = _device_for(need, cluster, kept)
            if isinstance(placed, Fit):
                return placed
            blocker = placed
        first = first or blocker
        if cluster.bypassed.get(need.number, 0) >= BYPASSED_MOST and blocker.limit is not Limit.NEIGHBOUR:
            free = [place for place in _allowed(need, cluster) if _kept_for(place, kept) is None]
            if free:
                kept[_emptiest(free, cluster).device] = need.number
    return first


def no_device_left(set_aside: Sequence[str], device_count: int = 1) -> str:
    """What is told where so many devices are set aside that none is left, or too few for a trial."""
    left = "no device is left" if device_count == 1 else f"fewer than the {device_count} devices of a trial are left"
    return f"{left} to run on: {few(set_aside)} set aside"


def _allowed(need: Need, cluster: Cluster) -> Sequence[DeviceCapacity]:
    places = cluster.places_for(need)
    allowed = [one for one in places if one.device is None or need.avoid.isdisjoint(devices_of(one.device))]
    return allowed or places


def _kept_for(place: DeviceCapacity, kept: Mapping[str | None, int]) -> int | None:
    """The trial that a place, or a device of it, is kept for."""
    return next((number for device, number in kept.items() if overlap(device, place.device)), None)


def _emptiest(places: Sequence[DeviceCapacity], cluster: Cluster) -> DeviceCapacity:
    """The place with the fewest trials, the first of equals."""
    return min(places, key=lambda place: len(cluster.on(place.device)))


def _host(need: Need, cluster: Cluster) -> Blocker | None:
    free_bytes, needed_bytes = cluster.host_free_bytes, need.host_bytes
    if cluster.allocations and cluster.host_unknown:
        return Blocker(need.number, Limit.HOST_MEMORY, cluster.host_unknown)
    if not cluster.allocations or free_bytes is None or needed_bytes is None or needed_bytes <= free_bytes:
        return None
    text = f"trial {need.number} takes {gib(needed_bytes)} of the host's memory, which has room for {gib(free_bytes)}"
    return Blocker(need.number, Limit.HOST_MEMORY, text)


def _device_for(need: Need, cluster: Cluster, kept: Mapping[str | None, int]) -> Fit | Blocker:
    blockers: list[Blocker] = []
    device_count = cluster.devices_for(need)
    for place in sorted(_allowed(need, cluster), key=lambda place: len(cluster.on(place.device))):
        owner = _kept_for(place, kept)
        if owner is not None:
            verb = "is" if device_count == 1 else "are"
            text = f"{_called(place)} {verb} kept for trial {owner}, which waits for room"
            blockers.append(Blocker(need.number, Limit.KEPT, text))
            continue
        blocker = _blocker(need, place, cluster)
        if blocker is None:
            return Fit(need.number, place.device)
        blockers.append(blocker)
    if not blockers:
        return Blocker(need.number, Limit.SET_ASIDE, no_device_left(cluster.set_aside, device_count))
    return min(blockers, key=lambda one: one.limit is Limit.NEIGHBOUR)


def _blocker(need: Need, place: DeviceCapacity, cluster: Cluster) -> Blocker | None:
    """Why a trial cannot start on a device now; None where it can."""
    there, called = cluster.on(place.device), _called(place)
    if place.blocked:
        return Blocker(need.number, Limit.NOT_RETURNED, place.blocked)
    alone = next((one for one in there if one.exclusive), None)
    if alone is not None:
        return Blocker(need.number, Limit.EXCLUSIVE, f"trial {alone.number} must be alone on {called}")
    if need.exclusive and there:
        return Blocker(need.number, Limit.EXCLUSIVE, f"trial {need.number} must be alone on {called}")
    wanted_bytes = need.shared_bytes if there else need.alone_bytes
    if wanted_bytes is None or place.capacity_bytes is None:
        return None
    taken_bytes = cluster.taken_bytes(place.device)
    if wanted_bytes + taken_bytes + place.neighbour_bytes <= place.capacity_bytes:
        return None
    others = few([str(one.number) for one in there])
    each = called if cluster.devices_for(need) == 1 else f"each of {called}"
    text = f"trial {need.number} needs {gib(wanted_bytes)} of {each}, which has {gib(place.capacity_bytes)}"
    text += f", {gib(taken_bytes)} of them planned for trial {others}" if there else ""
    text += f", {gib(place.neighbour_bytes)} of them held by others" if place.neighbour_bytes else ""
    least_bytes = need.alone_bytes or 0
    theirs = least_bytes <= place.capacity_bytes < least_bytes + place.neighbour_bytes
    return Blocker(need.number, Limit.NEIGHBOUR if theirs else Limit.DEVICE_MEMORY, text)


def _called(place: DeviceCapacity) -> str:
    return "the CPU" if place.device is None else place_in_words(place.device)
