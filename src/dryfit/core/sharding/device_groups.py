"""Groups of devices that one trial takes together, written as ``CUDA_VISIBLE_DEVICES`` takes them: ``GPU-a,GPU-b``.

Here a group is called a place; one device is a place too. Rank ``r`` of a trial gets the ``r``-th device.
"""

from collections.abc import Collection, Sequence
from typing import Final

from dryfit.core.errors import MachineError

_SEPARATOR: Final = ","


def devices_of(place: str) -> tuple[str, ...]:
    """Return the devices of a place, by rank."""
    return tuple(place.split(_SEPARATOR))


def place_of(devices: Sequence[str]) -> str:
    """Return the place of some devices."""
    return _SEPARATOR.join(devices)


def place_in_words(place: str) -> str:
    """Return a place in words: ``device 0``, or ``devices 0, 1``."""
    devices = devices_of(place)
    return f"device {place}" if len(devices) == 1 else f"devices {', '.join(devices)}"


def overlap(one: str | None, other: str | None) -> bool:
    """Whether two places have a device in common; None is the CPU."""
    if one is None or other is None:
        return one is other
    return one == other or not set(devices_of(one)).isdisjoint(devices_of(other))


def places_of(
    devices: Sequence[str], size: int, *, set_aside: Collection[str] = (), taken: Collection[str] = ()
) -> list[str]:
    """Divide devices into places of ``size`` that have no device in common.

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
    return [tuple(devices[at : at + size]) for at in range(0, len(devices) - size + 1, size)]
