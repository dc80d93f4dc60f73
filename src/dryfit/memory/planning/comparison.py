"""Compare a device's allocations with those planned, one by one; errors and constants of a calibration.

Only allocations are compared, not frees: a free lies where the last reference ends, and peaks show where that is wrong.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dryfit.core.errors import InternalError
from dryfit.core.jobs.calibration import (
    Calibration,
    CaseComparison,
    Deviation,
    MemoryCase,
    Observation,
    PhaseDifference,
)
from dryfit.core.jobs.memory import MemoryPlan, StepPhase
from dryfit.memory.allocator.snapshot import SnapshotTrace, compare
from dryfit.memory.planning.timeline import BLOCK_BYTES, Timeline

ALIGNED_BYTES = 64 * 1024
"""Smaller allocations are not compared in order: real code makes single numbers here and there."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An allocation.

    Attributes:
        size_bytes: Rounded up to whole blocks.
        by: Module and operator; empty where that is not known.
    """

    phase: StepPhase
    size_bytes: int
    by: str = ""


@dataclass(frozen=True, slots=True)
class ErrorSpread:
    """Sizes of errors, without their signs."""

    median: float
    p95: float
    worst: float


def planned_allocations(run: Timeline) -> list[Taken]:
    """List the allocations of a traced run, in order."""
    labels = [run.label_table[label] for label in run.labels.tolist()]
    return [
        Taken(label.phase, size, f"{label.module} {label.op}".strip())
        for label, size in zip(labels, run.rounded.tolist(), strict=True)
        if size > 0
    ]


def observed_allocations(trace: SnapshotTrace) -> list[Taken]:
    """List the allocations that a device's allocator recorded, in order.

    The main thread notes its phase in the allocator's metadata. They belong to a thread, so allocations without a
    phase are those of autograd's backward thread.

    Raises:
        InternalError: The metadata is no phase.
    """
    allocations: list[Taken] = []
    for index, note in enumerate(trace.notes):
        if note and note not in tuple(StepPhase):
            raise InternalError("reading an allocator's history", f"event {index} is of the phase {note!r}")
        if trace.deltas[index] > 0:
            allocations.append(Taken(StepPhase(note or StepPhase.BACKWARD), _whole_blocks(trace.deltas[index])))
    return allocations


def phase_differences(planned: Sequence[Taken], observed: Sequence[Taken]) -> tuple[PhaseDifference, ...]:
    """Compare the allocations of each phase as multisets of sizes."""
    differences: list[PhaseDifference] = []
    for phase in StepPhase:
        mine = Counter(allocation.size_bytes for allocation in planned if allocation.phase is phase)
        theirs = Counter(allocation.size_bytes for allocation in observed if allocation.phase is phase)
        if not mine and not theirs:
            continue
        only_planned, only_observed = mine - theirs, theirs - mine
        differences.append(
            PhaseDifference(
                phase=phase,
                matched=(mine & theirs).total(),
                only_planned_bytes=sum(size * count for size, count in only_planned.items()),
                only_observed_bytes=sum(size * count for size, count in only_observed.items()),
                largest_planned_bytes=max(only_planned, default=0),
                largest_observed_bytes=max(only_observed, default=0),
            )
        )
    return tuple(differences)


def first_deviation(planned: Sequence[Taken], observed: Sequence[Taken]) -> Deviation | None:
    """Find the first place at which two orders of allocations differ in size; None where they are the same.

    Args:
        planned: As traced.
        observed: As recorded.
    """
    mine = [one for one in planned if one.size_bytes >= ALIGNED_BYTES]
    theirs = [one for one in observed if one.size_bytes >= ALIGNED_BYTES]
    for index in range(max(len(mine), len(theirs))):
        one = mine[index] if index < len(mine) else None
        other = theirs[index] if index < len(theirs) else None
        if one is None or other is None or one.size_bytes != other.size_bytes:
            return Deviation(
                index=index,
                phase=(one or theirs[index]).phase,
                planned_bytes=one.size_bytes if one else None,
                planned_by=one.by if one else "",
                observed_bytes=other.size_bytes if other else None,
            )
    return None


def spread(errors: Sequence[float]) -> ErrorSpread:
    """Return the median, the 95th percentile (the smallest size that 95 % do not exceed) and the worst.

    Args:
        errors: At least one, of either sign.
    """
    sizes = sorted(abs(error) for error in errors)
    return ErrorSpread(median(sizes), sizes[math.ceil(0.95 * len(sizes)) - 1], sizes[-1])


def comparison(
    observation: Observation, plan: MemoryPlan, run: Timeline, history: SnapshotTrace | None = None
) -> CaseComparison:
    """Compare a case as planned with the same case as observed.

    Args:
        observation: Of the device.
        plan: Of the same case.
        run: The run that the plan was made from.
        history: The record of the device's allocator; None where there is none.
    """
    case: MemoryCase = observation.case
    compared = CaseComparison(
        name=case.name,
        family=case.family,
        planned_allocated_bytes=plan.peak_allocated_bytes,
        observed_allocated_bytes=observation.peak_allocated_bytes,
        planned_reserved_bytes=plan.peak_reserved_bytes,
        observed_reserved_bytes=observation.peak_reserved_bytes,
        planned_min_cap_bytes=plan.min_cap_bytes,
    )
    if history is None:
        return compared
    planned, observed = planned_allocations(run), observed_allocations(history)
    return compared.model_copy(
        update={
            "phases": phase_differences(planned, observed),
            "first_deviation": first_deviation(planned, observed),
            "replay_difference_bytes": compare(history),
            "replayed_events": len(history.blocks),
        }
    )


def measured_workspace(observations: Sequence[Observation]) -> int:
    """Return the largest cuBLAS workspace that was measured, in bytes for each thread."""
    return max(max(observation.workspace_bytes) for observation in observations)


def calibration_of(observations: Sequence[Observation], comparisons: Sequence[CaseComparison]) -> Calibration:
    """Return the constants and errors of the one device that was observed.

    Args:
        observations: At least one.
        comparisons: Of the same cases.
    """
    first = observations[0]
    errors = spread([compared.allocated_error for compared in comparisons])
    return Calibration(
        device_name=first.device.name,
        capability=first.device.capability,
        torch=first.torch,
        context_bytes=max(observation.context_bytes for observation in observations),
        workspace_bytes=measured_workspace(observations),
        error_median=errors.median,
        error_p95=errors.p95,
        runs=len(comparisons),
    )


def _whole_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
