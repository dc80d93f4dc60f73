"""Where a trial runs: a device of a node, a group of them, or a node's CPU: ``here/0``, ``n1/0,n1/1``, ``here/cpu``.

All these are called places. A node is a machine, and a group never spans two of them. Rank ``r`` of a trial gets the
``r``-th device. On its node a device has the name that ``CUDA_VISIBLE_DEVICES`` takes, which is all that a child sees.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Final

from dryfit.core.errors import MachineError

HERE: Final = "here"
"""The node that the control process itself runs on."""

_SEPARATOR: Final = ","
_OF_NODE: Final = "/"
_CPU: Final = "cpu"
_MIG: Final = "MIG-"
"""Names of MIG instances may contain the sign that ends a node's name."""


def cpu_of(node: str) -> str:
    """Return the place that is the CPU of a node."""
    return f"{node}{_OF_NODE}{_CPU}"


def place_on(node: str, visible: str) -> str:
    """Return the place of some devices of a node, named as ``CUDA_VISIBLE_DEVICES`` takes them there."""
    return place_of([f"{node}{_OF_NODE}{device}" for device in devices_of(visible)])


def node_of(place: str) -> str:
    """Return the node of a place; empty where its name has none."""
    node, sign, _ = place.partition(_OF_NODE)
    return node if sign else ""


def visible_devices(place: str) -> str | None:
    """Return a place as ``CUDA_VISIBLE_DEVICES`` takes it on its node; None: the CPU."""
    return None if on_cpu(place) else place_of([device.partition(_OF_NODE)[2] for device in devices_of(place)])


def on_cpu(place: str) -> bool:
    """Whether a place is the CPU of its node."""
    return place.partition(_OF_NODE)[2] == _CPU


def with_node(place: str) -> str:
    """Return a place from a ledger; those of older versions name no node, as there was one only."""
    named = _OF_NODE in place and not place.startswith(_MIG)
    return place if named else place_on(HERE, place)


def device_in_words(device: str) -> str:
    """Return a device's name for a person, who need not read of a node where it is this machine."""
    return device.removeprefix(f"{HERE}{_OF_NODE}")


def devices_of(place: str) -> tuple[str, ...]:
    """Return the devices of a place, by rank."""
    return tuple(place.split(_SEPARATOR))


def place_of(devices: Sequence[str]) -> str:
    """Return the place of some devices."""
    return _SEPARATOR.join(devices)


def place_in_words(place: str) -> str:
    """Return a place in words: ``device 0``, ``devices n1/0, n1/1``, or ``the CPU``."""
    if on_cpu(place):
        return "the CPU" if node_of(place) == HERE else f"the CPU of {node_of(place)}"
    devices = [device_in_words(device) for device in devices_of(place)]
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(devices)}"


def overlap(one: str, other: str) -> bool:
    """Whether two places have a device, or a node's CPU, in common."""
    return one == other or not set(devices_of(one)).isdisjoint(devices_of(other))


def places_of(
    devices: Sequence[str], size: int, *, set_aside: Collection[str] = (), taken: Collection[str] = ()
) -> list[str]:
    """Divide devices into places of ``size`` on one node each that have no device in common.

    Neighbours in ``devices`` form a place. Where one of them is missing, the others are combined with the remaining
    devices of other places. Places where trials run stay as they are until they are free.

    Args:
        devices: All devices, in their order.
        size: Devices per place.
        set_aside: Devices that are not used.
        taken: Places where trials run; one with a device that is set aside is not returned.

    Returns:
        The places, by their first device; remaining devices are in none.
    """
    busy = {device for place in taken for device in devices_of(place)}
    whole = [devices_of(place) for place in dict.fromkeys(taken)]
    places = [place for place in whole if len(place) == size and set(place) <= set(devices) - set(set_aside)]
    free = [device for device in devices if device not in busy and device not in set_aside]
    kept = [place for place in _chunks(devices, size) if set(place) <= set(free)]
    rest = [device for device in free if not any(device in place for place in kept)]
    every = [*places, *kept, *_chunks(rest, size)]
    return [place_of(place) for place in sorted(every, key=lambda place: devices.index(place[0]))]


def left_over(devices: Sequence[str], size: int, *, set_aside: Collection[str] = ()) -> tuple[str, ...]:
    """Return the devices that remain because they are too few for another place."""
    places = places_of(devices, size, set_aside=set_aside)
    used = {device for place in places for device in devices_of(place)}
    return tuple(device for device in devices if device not in used and device not in set_aside)


def most_on_a_node(devices: Iterable[str]) -> int:
    """Return how many devices the node with the most of them has."""
    return max((len(list(same)) for _, same in groupby(devices, node_of)), default=0)


def check_enough(count: int, together: int) -> None:
    """Refuse trials of more processes than there are devices.

    Args:
        count: Number of CUDA devices.
        together: Processes of a trial, each of which needs a device.

    Raises:
        MachineError: There are too few.
    """
    if together <= max(1, count):
        return
    raise MachineError(
        f"giving each of a trial's {together} processes a device of its own",
        f"there {'is' if count == 1 else 'are'} {count} CUDA device(s), by CUDA_VISIBLE_DEVICES where that is set",
        f"execution.tp or execution.dp of at most {count}",
        'lower it, show more devices, or set execution.device = "cpu": all processes then share the cores',
    )


def _chunks(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return as many groups of neighbours on one node as there are, the devices of a node standing together."""
    nodes = [list(same) for _, same in groupby(devices, node_of)]
    return [tuple(same[at : at + size]) for same in nodes for at in range(0, len(same) - size + 1, size)]
