"""Device memory that an ended process has not given back: noticed and waited for, until its device is set aside."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dryfit.core.sharding.device_groups import place_in_words
from dryfit.core.text.units import gib
from dryfit.runtime.machine.gpus import GpuState, ProcessOwner

RETURN_WAIT_S = 120.0
"""How long memory may take to come back; usually the kernel frees it as the process ends."""

SLACK_BYTES = 256 << 20
"""Growth that counts as none: contexts of others and the driver's own memory change too."""

LOOK_EVERY_S = 1.0
LOOK_BUSY_EVERY_S = 30.0
"""Seconds between two looks at a device that nothing could be placed on."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Memory that an ended process has left on a device.

    Attributes:
        number: The trial whose process it was.
        since_s: When it ended.
        most_bytes: The most that it can have taken; None: not known.
    """

    number: int
    since_s: float
    most_bytes: int | None


@dataclass(slots=True)
class DeviceRecord:
    """The session's record of one device.

    Attributes:
        look: The last look at it; None: nothing is known.
        looked_s: When that was.
        quiet_bytes: The least memory that belonged to no listed process while nothing of ours ran there.
        lists_ours: Whether a process of ours was ever listed there: from inside some containers none is.
        leftover: The memory that is waited for.
    """

    look: GpuState | None = None
    looked_s: float | None = None
    quiet_bytes: int | None = None
    lists_ours: bool = False
    leftover: Leftover | None = None

    def left_bytes(self, *, ours_run: bool) -> int:
        """Return the memory that an ended process still holds, as far as can be seen.

        The driver may still list the process. If it does not, the memory that belongs to no process has grown; that
        says nothing where our processes are not listed while they live.
        """
        look = self.look
        if look is None:
            return 0
        gone_bytes = look.held_bytes(ProcessOwner.GONE)
        judged = self.lists_ours and look.owners_known and (not ours_run or look.held_bytes(ProcessOwner.OURS) > 0)
        if not judged or self.quiet_bytes is None:
            return gone_bytes
        grown_bytes = look.unaccounted_bytes - self.quiet_bytes
        most_bytes = self.leftover.most_bytes if self.leftover is not None else None
        if most_bytes is not None:
            grown_bytes = min(grown_bytes, most_bytes)
        return gone_bytes + (grown_bytes if grown_bytes > SLACK_BYTES else 0)


@dataclass(slots=True)
class Leftovers:
    """Watches the devices of one session, without waiting itself.

    Attributes:
        state_of: Returns the state of a device now; None: it is not known.
    """

    state_of: Callable[[str], GpuState | None]
    _records: dict[str, DeviceRecord] = field(default_factory=dict[str, DeviceRecord])

    def look(self, device: str, now_s: float, *, ours_run: bool, every_s: float = LOOK_EVERY_S) -> GpuState | None:
        """Return a look at a device that is no older than ``every_s``.

        Args:
            device: Its name.
            now_s: The time, of any clock.
            ours_run: Whether a process of ours runs there.
            every_s: 0: look now.
        """
        record = self._records.setdefault(device, DeviceRecord())
        # A clock that was set back makes no look valid for longer.
        if record.looked_s is not None and 0 <= now_s - record.looked_s < every_s:
            return record.look
        record.look, record.looked_s = self.state_of(device), now_s
        if record.look is None:
            return None
        record.lists_ours = record.lists_ours or record.look.held_bytes(ProcessOwner.OURS) > 0
        if not ours_run:
            quiet_bytes = record.look.unaccounted_bytes
            record.quiet_bytes = quiet_bytes if record.quiet_bytes is None else min(record.quiet_bytes, quiet_bytes)
        return record.look

    def ended(self, device: str, leftover: Leftover, *, ours_run: bool) -> None:
        """Look at a device where a process has ended; if not all memory is back, wait for it."""
        self.look(device, leftover.since_s, ours_run=ours_run, every_s=0.0)
        record = self._records[device]
        before, record.leftover = record.leftover, leftover
        if not record.left_bytes(ours_run=ours_run):
            record.leftover = before

    def waiting_for(self, device: str, *, ours_run: bool) -> str:
        """Return what is waited for on a device, in words; empty: nothing."""
        record = self._records.get(device)
        if record is None or record.leftover is None:
            return ""
        left_bytes = record.left_bytes(ours_run=ours_run)
        if not left_bytes:
            record.leftover = None
            return ""
        number = record.leftover.number
        return f"{gib(left_bytes)} of {place_in_words(device)} are not back since trial {number} has ended"

    def overdue(self, device: str, now_s: float) -> bool:
        """Return whether a device has kept memory for too long."""
        record = self._records.get(device)
        leftover = record.leftover if record is not None else None
        return leftover is not None and now_s - leftover.since_s >= RETURN_WAIT_S
