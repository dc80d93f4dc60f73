"""Scheduling: chooses the next waiting trial to start and its place, by planned memory. Pure.

A trial that may run on several kinds of device has a need for each. It gets the place with the fewest trials, and of
equals the one of the smallest device.

A trial of several processes gets a group of devices as one place (:mod:`dryfit.settings.devices`). The
place's capacity is that of its tightest device, and memory is counted for each process on its own device.

Trials start in order of their numbers. A trial that does not fit beside the running ones may be bypassed by later ones
a limited number of times; then a device is reserved for it until it fits.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from dryfit.settings.devices import HERE, cpu_of, device_in_words, devices_of, node_of, on_cpu, overlap, place_in_words
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.text import few, gib

BYPASSED_MOST = 8
"""How many later trials may start while one waits for memory."""


class Limit(StrEnum):
    """What limits the number of trials that run side by side."""

    ASKED = "asked"
    """The number asked for, or that the machine's cores allow."""
    DEVICE_MEMORY = "device_memory"
    NEIGHBOUR = "neighbour"
    """Other programs hold so much of the device that the trial would not fit even alone."""
    HOST_MEMORY = "host_memory"
    EXCLUSIVE = "exclusive"
    """A trial must be alone on its device."""
    KEPT = "kept"
    """A device is reserved for a trial that was bypassed too often."""
    NOT_RETURNED = "not_returned"
    """A process has ended, but the device has not freed its memory."""
    SET_ASIDE = "set_aside"
    NO_NODE = "no_node"
    """No machine is there that trials may run on, or none with as many devices as they take."""


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that a waiting trial needs, on one kind of device.

    Attributes:
        number: The trial.
        shared_bytes: Memory that each of its processes takes of a device shared with other trials; None if unknown,
            then it is not counted.
        alone_bytes: The least memory that it needs on a device without other trials; None if unknown.
        exclusive: Whether it must be alone on its device.
        avoid: Devices to avoid as long as there are others.
        host_bytes: Host memory that it takes; None if unknown.
        device_count: Number of devices; None for the default of the cluster.
        kind: The kind of device that this is the need on; None: any.
    """

    number: int
    shared_bytes: int | None = None
    alone_bytes: int | None = None
    exclusive: bool = False
    avoid: frozenset[str] = frozenset()
    host_bytes: int | None = None
    device_count: int | None = None
    kind: DeviceSpec | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """A running trial and its place; ``needs_bytes`` is the memory it is counted with, None if it is not counted."""

    number: int
    place: str
    needs_bytes: int | None = None
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """The capacity of a place: a device, a group of devices, or the CPU of a node.

    Attributes:
        place: Its name.
        capacity_bytes: All of its memory; None if it is not counted.
        neighbour_bytes: Memory that other programs hold.
        blocked: Why no trial may start there now; empty if one may.
        kind: The kind of its device, or of the smallest one of a group; None: not known, or the CPU.
    """

    place: str
    capacity_bytes: int | None = None
    neighbour_bytes: int = 0
    blocked: str = ""
    kind: DeviceSpec | None = None


CPU = DeviceCapacity(cpu_of(HERE))


def group_capacity(place: str, capacities: Sequence[DeviceCapacity]) -> DeviceCapacity:
    """Return the capacity of a group: that of the device with the least free memory; blocked if one device is.

    A trial takes the same memory of each device, so what fits the tightest one fits all.
    """
    counted = [(each.capacity_bytes, each.neighbour_bytes) for each in capacities if each.capacity_bytes is not None]
    capacity_bytes, neighbour_bytes = min(counted, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    blocked = "; ".join(each.blocked for each in capacities if each.blocked)
    kinds = [each.kind for each in capacities if each.kind is not None]
    kind = min(kinds, key=lambda kind: kind.capacity_bytes, default=None)
    return DeviceCapacity(place, capacity_bytes, neighbour_bytes, blocked, kind)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices that trials can run on, and the trials that run there.

    Attributes:
        places: Every device, or group of devices, without one that is set aside; or the CPU of every node.
        allocations: The running trials.
        set_aside: Devices that get no more trials.
        host_free_bytes: Host memory that can still be taken, by node; it is not counted on nodes left out.
        host_unknown: Why a trial's host memory is not known yet; empty if it is known or not counted.
        full: Nodes on which as many trials run as may run side by side there.
        bypassed: How many trials have bypassed each waiting one.
        default_devices: Number of devices of a trial that asks for no other number.
        other_places: Groups of the same devices by other numbers of devices.
    """

    places: Sequence[DeviceCapacity] = (CPU,)
    allocations: Sequence[Allocation] = ()
    set_aside: Sequence[str] = ()
    host_free_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    host_unknown: str = ""
    full: Collection[str] = ()
    bypassed: Mapping[int, int] = field(default_factory=dict[int, int])
    default_devices: int = 1
    other_places: Mapping[int, Sequence[DeviceCapacity]] = field(default_factory=dict[int, Sequence[DeviceCapacity]])

    def devices_for(self, need: Need) -> int:
        """Return the number of devices that a trial takes."""
        return self.default_devices if need.device_count is None else need.device_count

    def places_for(self, need: Need) -> Sequence[DeviceCapacity]:
        """Return the places of a need's kind with as many devices as the trial takes; the CPU serves any number."""
        usual = self.devices_for(need) == self.default_devices or (self.places and on_cpu(self.places[0].place))
        places = self.places if usual else self.other_places.get(self.devices_for(need), ())
        return [place for place in places if need.kind is None or place.kind == need.kind]

    def on(self, place: str) -> list[Allocation]:
        """Return the trials that run on a device, on any device of a group, or on a CPU."""
        return [allocation for allocation in self.allocations if overlap(allocation.place, place)]

    def taken_bytes(self, place: str) -> int:
        """Return the memory counted for the trials on a device; for a group, the most on any of its devices."""
        return max(sum(allocation.needs_bytes or 0 for allocation in self.on(name)) for name in devices_of(place))


@dataclass(frozen=True, slots=True)
class Fit:
    """A trial that can start, its place, and the kind of device that its need there is for."""

    number: int
    place: str
    kind: DeviceSpec | None = None


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a trial cannot start now.

    Attributes:
        number: The trial.
        limit: The kind of reason.
        text: The reason in words.
    """

    number: int
    limit: Limit
    text: str


def need_on(needs: Sequence[Need], number: int, kind: DeviceSpec | None) -> Need:
    """Return the need of a trial on one kind of device; one that asks for nothing where it has none."""
    return next((need for need in needs if need.kind == kind), Need(number, kind=kind))


def pack(needs: Sequence[Need], cluster: Cluster) -> Fit | Blocker | None:
    """Choose the next trial to start, and its place.

    Args:
        needs: The needs of the waiting trials, by number; those of one trial are for different kinds of device.
        cluster: The devices and the running trials.

    Returns:
        The trial to start, or else why the first one cannot start; None if none waits.
    """
    first: Blocker | None = None
    kept: dict[str, int] = {}
    for number, alternatives in groupby(needs, key=lambda need: need.number):
        tried = [(need, _place_for(need, cluster, kept)) for need in alternatives]
        fits = [found for _, found in tried if isinstance(found, Fit)]
        if fits:
            return min(fits, key=lambda fit: len(cluster.on(fit.place)))
        for need, blocker in tried:
            assert isinstance(blocker, Blocker)
            first = first or blocker
            if cluster.bypassed.get(number, 0) >= BYPASSED_MOST and blocker.limit is not Limit.NEIGHBOUR:
                free = [place for place in _allowed(need, cluster) if _kept_for(place, kept) is None]
                if free:
                    kept[_emptiest(free, cluster).place] = number
                    break
    return first


def no_device_left(set_aside: Sequence[str], device_count: int = 1) -> str:
    """Return the message for a study whose devices are set aside, so that too few are left for a trial."""
    left = "no device is left" if device_count == 1 else f"fewer than the {device_count} devices of a trial are left"
    return f"{left} to run on: {few([device_in_words(device) for device in set_aside])} set aside"


def _allowed(need: Need, cluster: Cluster) -> Sequence[DeviceCapacity]:
    places = cluster.places_for(need)
    allowed = [place for place in places if need.avoid.isdisjoint(devices_of(place.place))]
    return allowed or places


def _kept_for(place: DeviceCapacity, kept: Mapping[str, int]) -> int | None:
    """Return the trial for which a place, or a device of it, is reserved."""
    return next((number for other, number in kept.items() if overlap(other, place.place)), None)


def _emptiest(places: Sequence[DeviceCapacity], cluster: Cluster) -> DeviceCapacity:
    """Return the place with the fewest trials, the first of equals."""
    return min(places, key=lambda place: len(cluster.on(place.place)))


def _node_blocker(need: Need, node: str, cluster: Cluster) -> Blocker | None:
    """Return why a trial cannot start on a node now, whatever its devices have room for; None if it can."""
    if node in cluster.full:
        return Blocker(need.number, Limit.ASKED, f"as many trials run on node {node} as may run there")
    free_bytes, needed_bytes = cluster.host_free_bytes.get(node), need.host_bytes
    if free_bytes is None:
        return None
    if cluster.host_unknown:
        return Blocker(need.number, Limit.HOST_MEMORY, cluster.host_unknown)
    if needed_bytes is None or needed_bytes <= free_bytes:
        return None
    whose = "the host's memory" if node == HERE else f"the memory of node {node}"
    text = f"trial {need.number} takes {gib(needed_bytes)} of {whose}, which has room for {gib(free_bytes)}"
    return Blocker(need.number, Limit.HOST_MEMORY, text)


def _place_for(need: Need, cluster: Cluster, kept: Mapping[str, int]) -> Fit | Blocker:
    blockers: list[Blocker] = []
    device_count = cluster.devices_for(need)
    for place in sorted(_allowed(need, cluster), key=lambda place: len(cluster.on(place.place))):
        blocker = _node_blocker(need, node_of(place.place), cluster)
        if blocker is not None:
            blockers.append(blocker)
            continue
        owner = _kept_for(place, kept)
        if owner is not None:
            verb = "is" if device_count == 1 else "are"
            text = f"{place_in_words(place.place)} {verb} kept for trial {owner}, which waits for room"
            blockers.append(Blocker(need.number, Limit.KEPT, text))
            continue
        blocker = _blocker(need, place, cluster)
        if blocker is None:
            return Fit(need.number, place.place, need.kind)
        blockers.append(blocker)
    if not blockers and not cluster.set_aside and not cluster.places:
        text = "no node is there that trials may run on"
        lacks = f"no node has the {device_count} devices of a trial"
        return Blocker(need.number, Limit.NO_NODE, text if device_count == 1 else lacks)
    if not blockers and need.kind is not None and all(place.kind != need.kind for place in cluster.places):
        text = f"trial {need.number} waits for a device like {need.kind.name} ({gib(need.kind.capacity_bytes)})"
        return Blocker(need.number, Limit.NO_NODE, f"{text}, and no node that is there has one")
    if not blockers:
        return Blocker(need.number, Limit.SET_ASIDE, no_device_left(cluster.set_aside, device_count))
    return min(blockers, key=lambda blocker: blocker.limit is Limit.NEIGHBOUR)


def _blocker(need: Need, place: DeviceCapacity, cluster: Cluster) -> Blocker | None:
    """Return why a trial cannot start on a place now; None if it can."""
    there, place_text = cluster.on(place.place), place_in_words(place.place)
    if place.blocked:
        return Blocker(need.number, Limit.NOT_RETURNED, place.blocked)
    alone = next((allocation for allocation in there if allocation.exclusive), None)
    if alone is not None:
        return Blocker(need.number, Limit.EXCLUSIVE, f"trial {alone.number} must be alone on {place_text}")
    if need.exclusive and there:
        return Blocker(need.number, Limit.EXCLUSIVE, f"trial {need.number} must be alone on {place_text}")
    wanted_bytes = need.shared_bytes if there else need.alone_bytes
    if wanted_bytes is None or place.capacity_bytes is None:
        return None
    taken_bytes = cluster.taken_bytes(place.place)
    if wanted_bytes + taken_bytes + place.neighbour_bytes <= place.capacity_bytes:
        return None
    others = few([str(allocation.number) for allocation in there])
    each = place_text if cluster.devices_for(need) == 1 else f"each of {place_text}"
    text = f"trial {need.number} needs {gib(wanted_bytes)} of {each}, which has {gib(place.capacity_bytes)}"
    text += f", {gib(taken_bytes)} of them planned for trial {others}" if there else ""
    text += f", {gib(place.neighbour_bytes)} of them held by others" if place.neighbour_bytes else ""
    least_bytes = need.alone_bytes or 0
    theirs = least_bytes <= place.capacity_bytes < least_bytes + place.neighbour_bytes
    return Blocker(need.number, Limit.NEIGHBOUR if theirs else Limit.DEVICE_MEMORY, text)
