"""Answers of one rehearsed command on several devices."""

from dataclasses import dataclass

from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer


@dataclass(frozen=True, slots=True)
class DeviceAnswer:
    """What was said of a command on one device.

    Attributes:
        recorded_on: Name of the device whose rehearsal tells it: its own, or one that has done the same until then.
        apart: Why it could not share the recording of another of its architecture; empty: it could, or needed none.
    """

    answer: RehearsalAnswer
    recorded_on: str
    apart: str = ""

    @property
    def device(self) -> DeviceSpec:
        """The device."""
        return self.answer.device

    @property
    def fits(self) -> bool | None:
        """Whether it fits as it is; None: unknown."""
        answer = self.answer
        return None if answer.verdict is VerdictKind.UNKNOWN or not answer.went_through else answer.fits

    @property
    def left_over_bytes(self) -> int | None:
        """What the device has beyond what the script needs, below 0 where it is short; None: unknown."""
        memory = self.answer.memory
        return None if memory is None else self.device.capacity_bytes - memory.required_bytes


@dataclass(frozen=True, slots=True)
class DeviceAnswers:
    """What was said of a command on several devices, in the order in which they were named.

    Attributes:
        interrupted: Whether Ctrl-C came: devices may be missing then.
    """

    answers: tuple[DeviceAnswer, ...]
    rehearsals: int
    rehearsal_s: float
    interrupted: bool = False

    @property
    def fitting(self) -> tuple[DeviceAnswer, ...]:
        """Those of the devices on which it fits."""
        return tuple(one for one in self.answers if one.fits)

    @property
    def fits(self) -> bool:
        """Whether it fits on all of them."""
        return len(self.fitting) == len(self.answers)

    @property
    def ran(self) -> bool:
        """Whether anything can be said of its memory on any of them."""
        return any(one.answer.ran for one in self.answers)
