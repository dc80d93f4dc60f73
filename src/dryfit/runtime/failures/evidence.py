"""What is seen around a child when it ends: its device, shared memory, the disk."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from dryfit.core.failure import Evidence
from dryfit.core.sharding.device_groups import place_of
from dryfit.runtime.machine.gpus import GpuMonitor

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class _Placed:
    device: str
    planned_bytes: int | None
    xids_before: int


@dataclass(frozen=True, slots=True)
class _Memory:
    free_bytes: int
    total_bytes: int
    neighbour_bytes: int


@dataclass(slots=True)
class EvidenceCollector:
    """Looks around for evidence; :meth:`probe` belongs into the supervisor's settings.

    Attributes:
        devices: Who can be asked of devices.
        folder: Where the study lies.
        shared_memory: Where shared memory is mounted.
    """

    devices: GpuMonitor
    folder: Path
    shared_memory: Path = SHARED_MEMORY
    _placed: dict[str, list[_Placed]] = field(default_factory=dict[str, list[_Placed]])

    def placed(self, key: str, device: str, planned_bytes: int | None) -> None:
        """Remember a device that a child is about to run on, by its rank, and what was planned for it there."""
        before = len(self.devices.xids(device))
        self._placed.setdefault(key, []).append(_Placed(device, planned_bytes, before))

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
        xids = [(xid, one.device) for one in placed for xid in self.devices.xids(one.device)[one.xids_before :]]
        found = replace(
            found,
            device=place_of([one.device for one in placed]),
            planned_bytes=placed[0].planned_bytes,
            xids=tuple(xid for xid, _ in xids),
            xid_devices=tuple(device for _, device in xids),
        )
        seen = [memory for one in placed if (memory := self._memory(one.device)) is not None]
        if not seen:
            return found
        tightest = min(seen, key=lambda memory: memory.total_bytes - memory.neighbour_bytes)
        return replace(
            found,
            device_free_bytes=tightest.free_bytes,
            device_total_bytes=tightest.total_bytes,
            neighbour_bytes=tightest.neighbour_bytes,
        )

    def _memory(self, device: str) -> _Memory | None:
        look = self.devices.look(device)
        if look is None:
            return None
        beside = [one for placed in self._placed.values() for one in placed if one.device == device]
        planned_bytes = sum(one.planned_bytes or 0 for one in beside)
        neighbour_bytes = look.neighbour_bytes(planned_bytes, ours=bool(beside))
        return _Memory(look.free_bytes, look.total_bytes, neighbour_bytes)


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
