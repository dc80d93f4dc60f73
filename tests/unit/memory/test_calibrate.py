"""Constants and errors of a calibration."""

import json

import pytest

from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import ExecutionChoice, MemoryPlan, PlanSubject, WorstBatch
from dryfit.settings.memory_terms import DeviceSpec, PeakAt, StepPhase
from dryfit.settings.plan_messages import CaseComparison, MemoryCase, Observation, PartPeak
from dryfit.settings.tables import TrialSettings
from dryfit.training.calibrate import calibration_of, comparison, spread

MIB = 2**20
DEVICE = DeviceSpec(name="NVIDIA H200", capacity_bytes=2**37, capability=(9, 0))


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
        peak_at=PeakAt(phase=StepPhase.FORWARD, module="", op=""),
        worst_batch=WorstBatch(rows=1, length=1, from_data=False),
    )


def test_peaks_are_compared() -> None:
    found = comparison(observation(100 * MIB), plan(103 * MIB))
    assert found.allocated_error == pytest.approx(0.03)


def test_errors_are_spread_without_their_signs() -> None:
    found = spread([-0.04, 0.01, 0.02])
    assert (found.median, found.p95, found.worst) == (0.02, 0.04, 0.04)
    many = spread([n / 100 for n in range(1, 21)])
    assert (many.p95, many.worst) == (0.19, 0.20)


def test_the_calibration_has_the_largest_constants() -> None:
    observations = [observation(100 * MIB, "a"), observation(200 * MIB, "b", context=600 * MIB)]
    comparisons: list[CaseComparison] = [
        comparison(one, plan(size * MIB)) for one, size in zip(observations, (101, 194), strict=True)
    ]
    found = calibration_of(observations, comparisons)
    assert (found.device_name, found.capability, found.runs) == ("NVIDIA H200", (9, 0), 2)
    assert (found.context_bytes, found.workspace_bytes) == (600 * MIB, 32 * MIB)
    assert found.error_median == pytest.approx(0.02)
    assert found.error_p95 == pytest.approx(0.03)
