"""Collects evidence around the end of a child: the state of its device, shared memory and the disk."""

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
        known = [memory for rank in placed if (memory := self._memory(rank.device)) is not None]
        if not known:
            return evidence
        tightest = min(known, key=lambda memory: memory.total_bytes - memory.neighbour_bytes)
        return replace(
            evidence,
            device_free_bytes=tightest.free_bytes,
            device_total_bytes=tightest.total_bytes,
            neighbour_bytes=tightest.neighbour_bytes,
        )

    def _memory(self, device: str) -> _Memory | None:
        state = self.devices.look(device)
        if state is None:
            return None
        beside = [rank for placed in self._placed.values() for rank in placed if rank.device == device]
        planned_bytes = sum(rank.planned_bytes or 0 for rank in beside)
        neighbour_bytes = state.neighbour_bytes(planned_bytes, ours=bool(beside))
        return _Memory(state.free_bytes, state.total_bytes, neighbour_bytes)


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
