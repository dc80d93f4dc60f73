"""Devices that one trial takes together: a place that trials are given, named by its devices in their order.

A place of one device has that device's name; of several it has their names as ``CUDA_VISIBLE_DEVICES`` takes them:
``GPU-a,GPU-b``. Rank ``r`` of a trial gets the ``r``-th.
"""

from collections.abc import Collection, Sequence
from typing import Final

from dryfit.core.errors import MachineError

_SEPARATOR: Final = ","


def devices_of(place: str) -> tuple[str, ...]:
    """The devices of a place, by rank."""
    return tuple(place.split(_SEPARATOR))


def place_of(devices: Sequence[str]) -> str:
    """The place that some devices are together."""
    return _SEPARATOR.join(devices)


def place_in_words(place: str) -> str:
    """A place for a person: ``device 0``, or ``devices 0, 1``."""
    devices = devices_of(place)
    return f"device {place}" if len(devices) == 1 else f"devices {', '.join(devices)}"


def overlap(one: str | None, other: str | None) -> bool:
    """Whether two places have a device in common; None, the CPU, is a place of its own."""
    if one is None or other is None:
        return one is other
    return one == other or not set(devices_of(one)).isdisjoint(devices_of(other))


def places_of(
    devices: Sequence[str], size: int, *, set_aside: Collection[str] = (), taken: Collection[str] = ()
) -> list[str]:
    """Divide devices into places of ``size`` that have no device in common.

    Neighbours in ``devices`` come together, as far as all of them are there. Where a device is missing, what is left of
    its place is put together with what is left of others. Places where trials run stay as they are, and their devices
    are not given to another one before they are free.

    Args:
        devices: All devices, in their order.
        size: Devices of each place.
        set_aside: Devices that are in none.
        taken: Places where trials run; one with a device that is set aside is not among the answers.

    Returns:
        The places, by their first device; what is left over is in none.
    """
    busy = {device for place in taken for device in devices_of(place)}
    whole = [devices_of(place) for place in dict.fromkeys(taken)]
    places = [place for place in whole if len(place) == size and set(place) <= set(devices) - set(set_aside)]
    free = [device for device in devices if device not in busy and device not in set_aside]
    kept = [place for place in _chunks(devices, size) if set(place) <= set(free)]
    rest = [device for device in free if not any(device in place for place in kept)]
    found = [*places, *kept, *_chunks(rest, size)]
    return [place_of(place) for place in sorted(found, key=lambda place: devices.index(place[0]))]


def left_over(devices: Sequence[str], size: int, *, set_aside: Collection[str] = ()) -> tuple[str, ...]:
    """The devices that no place has although they are there: too few are left to fill another one."""
    places = places_of(devices, size, set_aside=set_aside)
    used = {device for place in places for device in devices_of(place)}
    return tuple(device for device in devices if device not in used and device not in set_aside)


def check_enough(count: int, together: int) -> None:
    """Refuse trials of more processes than there are devices.

    Args:
        count: CUDA devices that are there.
        together: Processes of a trial, each of which needs one for itself.

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
