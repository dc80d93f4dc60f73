"""What a step that the user measured says of a GPU: one number, kept beside the calibrations of memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from dryfit.settings.device_reach import DeviceReach, ReachLevel, device_reach
from dryfit.settings.files import read_model, write_model
from dryfit.settings.records import Message, Record
from dryfit.settings.version import minor_version

REACH_FILE: Final = "step-time.json"
Quantity = Literal["tensor", "simt", "bandwidth"]
"""A field of :class:`~dryfit.settings.device_reach.DeviceReach`: what decided on the measured step."""


class ReachCalibration(Record):
    """One measured step, and what the device must reach so that the step takes so long.

    Attributes:
        value: Share of the published peak.
        torch: Version that ran.
        watts: The device's power limit; None: not known.
        day: When it was calibrated, ISO 8601.
        command: What was run.
    """

    device: str
    quantity: Quantity
    value: float
    measured_s: float
    torch: str
    watts: int | None
    day: str
    command: str


class ReachCalibrations(Message):
    """The file; later ones are newer."""

    steps: tuple[ReachCalibration, ...] = ()


def read_reach_calibrations(folder: Path) -> tuple[ReachCalibration, ...]:
    """Return the calibrations of a folder; none where the file is absent or of another version."""
    try:
        stored = read_model(folder / REACH_FILE, ReachCalibrations)
    except ValueError:
        return ()
    return stored.steps if stored else ()


def keep_reach(folder: Path, made: ReachCalibration) -> None:
    """Add a calibration, in place of an earlier one of the same number, device, version of torch and power limit."""
    folder.mkdir(parents=True, exist_ok=True)
    others = [one for one in read_reach_calibrations(folder) if _key(one) != _key(made)]
    write_model(folder / REACH_FILE, ReachCalibrations(steps=(*others, made)))


def calibrated_reach(name: str, torch: str, calibrations: Sequence[ReachCalibration]) -> DeviceReach | None:
    """Return a device's reach by the newest calibrations of each number, those of the same version of torch first.

    None of an amount of memory.
    """
    reach = device_reach(name)
    if reach is None:
        return None
    own = sorted(
        (one for one in calibrations if one.device == name),
        key=lambda one: minor_version(one.torch) == minor_version(torch),
    )
    for one in own:  # a later one overwrites an earlier one
        reach = replace(
            reach,
            level=ReachLevel.CALIBRATED,
            basis=f"your step of {one.measured_s:.3g} s, {one.day}",
            guessed="" if reach.guessed == one.quantity else reach.guessed,
            calibrated=reach.calibrated | {one.quantity},
            **{one.quantity: one.value},
        )
    return reach


def _key(one: ReachCalibration) -> tuple[object, ...]:
    return one.device, one.quantity, minor_version(one.torch), one.watts
