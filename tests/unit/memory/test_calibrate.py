"""Plans beside what a device recorded, on histories made by the simulated allocator."""

import json
import pickle
from pathlib import Path

import pytest

from dryfit.core.errors import InternalError
from dryfit.core.jobs.calibration import CaseComparison, MemoryCase, Observation, PartPeak
from dryfit.core.jobs.memory import (
    ExecutionChoice,
    MemoryCategory,
    MemoryPlan,
    PeakAt,
    StepPhase,
    WorstBatch,
)
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.execution import DeviceSpec, PlanSubject
from dryfit.core.settings.tables import TrialSettings
from dryfit.memory.allocator.snapshot import SnapshotTrace, read_snapshot
from dryfit.memory.planning.comparison import (
    Taken,
    calibration_of,
    comparison,
    first_deviation,
    observed_allocations,
    phase_differences,
    planned_allocations,
    spread,
)
from dryfit.memory.planning.timeline import compose
from dryfit.memory.tracing.events import Label, Segment
from snapshots import snapshot_of

MIB = 2**20
F, B = StepPhase.FORWARD, StepPhase.BACKWARD
DEVICE = DeviceSpec(name="NVIDIA H200", capacity_bytes=2**37, capability=(9, 0))
LABELS = (
    Label(F, MemoryCategory.ACTIVATIONS, "encoder.layer.0", "aten.mm.default"),
    Label(B, MemoryCategory.TEMPORARIES, "encoder.layer.0", "aten.mm.default"),
)
SEGMENT = Segment(
    blocks=(0, 1, 0, 2, 1, 2),
    deltas=(30 * MIB, 12 * MIB, -30 * MIB, 11 * MIB + 1, -12 * MIB, -11 * MIB - 1),
    labels=(0, 0, 0, 1, 1, 1),
    label_table=LABELS,
    names={},
    gemm_at={},
)


def history(folder: Path, *, notes: tuple[str, ...] = ("forward", "forward", "")) -> SnapshotTrace:
    """What a device records that runs exactly the events of ``SEGMENT``; each allocation has its thread's note."""
    content = snapshot_of(SEGMENT.blocks, SEGMENT.deltas)
    left = list(notes)
    for entry in content["device_traces"][0]:
        entry["user_metadata"] = left.pop(0) if entry["action"] == "alloc" else "forward"
    path = folder / "history.pickle"
    path.write_bytes(pickle.dumps(content))
    return read_snapshot(path)


def observation(allocated: int = 42 * MIB, name: str = "a", context: int = 500 * MIB) -> Observation:
    settings = TrialSettings.model_validate_json(json.dumps({"model": {"name": "bert-base-uncased"}}))
    case = MemoryCase(
        name=name,
        family="encoder",
        subject=PlanSubject(task=BuiltInTask.CRITERIA, settings=settings),
        execution=ExecutionChoice(micro_batch=16, accumulation=1),
    )
    parts = tuple(
        PartPeak(part=part, allocated_bytes=size, reserved_bytes=2 * size)
        for part, size in (("load", allocated // 2), ("first step", allocated), ("checkpoint", allocated // 3))
    )
    return Observation(
        case=case,
        device=DEVICE,
        torch="2.13.0+cu130",
        parts=parts,
        context_bytes=context,
        workspace_bytes=(32 * MIB, 8 * MIB),
        steps=3,
    )


def plan(allocated: int) -> MemoryPlan:
    return MemoryPlan(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=2 * allocated,
        min_cap_bytes=allocated,
        overhead_bytes=0,
        margin_bytes=0,
        required_bytes=allocated,
        by_category={},
        by_phase={},
        peak_at=PeakAt(phase=F, module="", op=""),
        worst_batch=WorstBatch(rows=1, length=1, from_data=False),
    )


def test_a_trace_and_its_own_history_agree(tmp_path: Path) -> None:
    run = compose([[SEGMENT]])
    found = comparison(observation(), plan(42 * MIB), run, history(tmp_path))
    assert found.first_deviation is None
    assert [(one.phase, one.matched) for one in found.phases] == [(F, 2), (B, 1)]
    assert not any(one.only_planned_bytes or one.only_observed_bytes for one in found.phases)
    assert (found.replay_difference_bytes, found.replayed_events) == (0, 6)
    assert (found.allocated_error, found.reserved_error) == (0, 0)


def test_sizes_are_those_of_whole_blocks(tmp_path: Path) -> None:
    planned = planned_allocations(compose([[SEGMENT]]))
    assert [one.size_bytes for one in planned] == [30 * MIB, 12 * MIB, 11 * MIB + 512]
    assert planned[2].by == "encoder.layer.0 aten.mm.default"
    observed = observed_allocations(history(tmp_path))
    assert [(one.phase, one.size_bytes) for one in observed] == [(one.phase, one.size_bytes) for one in planned]


def test_a_note_that_is_no_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="lunch"):
        observed_allocations(history(tmp_path, notes=("forward", "lunch", "")))


def test_without_a_history_only_peaks_are_compared() -> None:
    found = comparison(observation(100 * MIB), plan(103 * MIB), compose([[SEGMENT]]))
    assert found.allocated_error == pytest.approx(0.03)
    assert (found.phases, found.first_deviation, found.replay_difference_bytes) == ((), None, None)


def test_what_only_one_side_has_is_told_phase_by_phase() -> None:
    planned = [Taken(F, 10 * MIB), Taken(F, 4 * MIB), Taken(B, 6 * MIB)]
    observed = [Taken(F, 4 * MIB), Taken(F, 10 * MIB), Taken(F, 10 * MIB), Taken(StepPhase.CLIP, 512)]
    forward, backward, clip = phase_differences(planned, observed)
    assert (forward.matched, forward.only_planned_bytes, forward.only_observed_bytes) == (2, 0, 10 * MIB)
    assert (backward.matched, backward.only_planned_bytes, backward.largest_planned_bytes) == (0, 6 * MIB, 6 * MIB)
    assert (clip.only_observed_bytes, clip.largest_observed_bytes) == (512, 512)


def test_the_first_deviation_is_named_and_single_numbers_are_passed_over() -> None:
    planned = [Taken(F, 4 * MIB), Taken(F, 512), Taken(B, 6 * MIB, "layer aten.mm")]
    assert first_deviation(planned, [Taken(F, 4 * MIB), Taken(B, 6 * MIB)]) is None
    found = first_deviation(planned, [Taken(F, 4 * MIB), Taken(B, 7 * MIB)])
    assert found is not None
    assert (found.index, found.phase, found.planned_by) == (1, B, "layer aten.mm")
    assert (found.planned_bytes, found.observed_bytes) == (6 * MIB, 7 * MIB)
    more = first_deviation(planned, [Taken(F, 4 * MIB)])
    assert more is not None and more.observed_bytes is None
    less = first_deviation([], planned)
    assert less is not None and (less.phase, less.planned_bytes) == (F, None)


def test_errors_are_spread_without_their_signs() -> None:
    found = spread([-0.04, 0.01, 0.02])
    assert (found.median, found.p95, found.worst) == (0.02, 0.04, 0.04)
    many = spread([n / 100 for n in range(1, 21)])
    assert (many.p95, many.worst) == (0.19, 0.20)


def test_the_calibration_has_the_largest_constants() -> None:
    observations = [observation(100 * MIB, "a"), observation(200 * MIB, "b", context=600 * MIB)]
    comparisons: list[CaseComparison] = [
        comparison(one, plan(size * MIB), compose([[SEGMENT]]))
        for one, size in zip(observations, (101, 194), strict=True)
    ]
    found = calibration_of(observations, comparisons)
    assert (found.device_name, found.capability, found.runs) == ("NVIDIA H200", (9, 0), 2)
    assert (found.context_bytes, found.workspace_bytes) == (600 * MIB, 32 * MIB)
    assert found.error_median == pytest.approx(0.02)
    assert found.error_p95 == pytest.approx(0.03)
