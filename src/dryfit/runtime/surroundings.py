"""What is seen around a child when it ends: its device, shared memory, the disk."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from dryfit.core.failure import Evidence
from dryfit.runtime.devices import Devices

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class _Placed:
    device: str
    planned_bytes: int | None
    xids_before: int


@dataclass(slots=True)
class Surroundings:
    """Looks around for evidence; :meth:`probe` belongs into the supervisor's settings.

    Attributes:
        devices: Who can be asked of devices.
        folder: Where the study lies.
        shared_memory: Where shared memory is mounted.
    """

    devices: Devices
    folder: Path
    shared_memory: Path = SHARED_MEMORY
    _placed: dict[str, _Placed] = field(default_factory=dict[str, _Placed])

    def placed(self, key: str, device: str, planned_bytes: int | None) -> None:
        """Remember where a child is about to run, and what was planned for it there."""
        self._placed[key] = _Placed(device, planned_bytes, len(self.devices.xids(device)))

    def probe(self, key: str, evidence: Evidence) -> Evidence:
        """Add to the evidence of a child's end what is around it now."""
        found = replace(
            evidence,
            shm_free_bytes=_free_bytes(self.shared_memory),
            disk_free_bytes=_free_bytes(self.folder),
        )
        placed = self._placed.pop(key, None)
        if placed is None:
            return found
        found = replace(
            found,
            device=placed.device,
            planned_bytes=placed.planned_bytes,
            xids=self.devices.xids(placed.device)[placed.xids_before :],
        )
        look = self.devices.look(placed.device)
        if look is None:
            return found
        beside = [one for one in self._placed.values() if one.device == placed.device]
        planned_bytes = sum(one.planned_bytes or 0 for one in beside)
        return replace(
            found,
            device_free_bytes=look.free_bytes,
            device_total_bytes=look.total_bytes,
            neighbour_bytes=look.neighbour_bytes(planned_bytes, ours=bool(beside)),
        )


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
