"""Collects evidence around the end of a child: the state of its device, shared memory and the disk."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from dryfit.core.failure import Evidence
from dryfit.core.sharding.device_groups import place_of
from dryfit.runtime.machine.gpus import GpuMonitor, GpuState

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class _Placed:
    device: str
    planned_bytes: int | None
    xids_before: int


@dataclass(slots=True)
class EvidenceCollector:
    """Adds the state of the machine to the evidence of a child's end; the supervisor calls :meth:`probe`.

    Attributes:
        devices: Reports the state of GPUs.
        folder: The study's folder.
        shared_memory: The mount point of shared memory.
    """

    devices: GpuMonitor
    folder: Path
    shared_memory: Path = SHARED_MEMORY
    _placed: dict[str, list[_Placed]] = field(default_factory=dict[str, list[_Placed]])

    def placed(self, key: str, device: str, planned_bytes: int | None) -> None:
        """Remember a device that a child is about to run on, and its planned memory there; once for each rank."""
        before = len(self.devices.xids(device))
        self._placed.setdefault(key, []).append(_Placed(device, planned_bytes, before))

    def probe(self, key: str, evidence: Evidence) -> Evidence:
        """Return the evidence of a child's end with the present state of its surroundings added."""
        evidence = replace(
            evidence,
            shm_free_bytes=_free_bytes(self.shared_memory),
            disk_free_bytes=_free_bytes(self.folder),
        )
        placed = self._placed.pop(key, None)
        if placed is None:
            return evidence
        xids = [(xid, rank.device) for rank in placed for xid in self.devices.xids(rank.device)[rank.xids_before :]]
        evidence = replace(
            evidence,
            device=place_of([rank.device for rank in placed]),
            planned_bytes=placed[0].planned_bytes,
            xids=tuple(xid for xid, _ in xids),
            xid_devices=tuple(device for _, device in xids),
        )
        looks = [(rank.device, self.devices.look(rank.device)) for rank in placed]
        states = [(state, self._neighbour_bytes(device, state)) for device, state in looks if state is not None]
        if not states:
            return evidence
        tightest, neighbour_bytes = min(states, key=lambda pair: pair[0].total_bytes - pair[1])
        return replace(
            evidence,
            device_free_bytes=tightest.free_bytes,
            device_total_bytes=tightest.total_bytes,
            neighbour_bytes=neighbour_bytes,
        )

    def _neighbour_bytes(self, device: str, state: GpuState) -> int:
        beside = [rank for placed in self._placed.values() for rank in placed if rank.device == device]
        return state.neighbour_bytes(sum(rank.planned_bytes or 0 for rank in beside), ours=bool(beside))


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
