"""Which device a trial's process sees."""

from collections.abc import Sequence


def least_busy_device(in_use: Sequence[str | None], count: int) -> str:
    """The device with the fewest running trials, the lowest index of equals.

    Args:
        in_use: The devices of the running trials.
        count: Devices there are; each trial sees exactly one.
    """
    return min((str(index) for index in range(count)), key=lambda device: (in_use.count(device), int(device)))
