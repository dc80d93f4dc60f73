"""Child job CALIBRATE: measure what training steps take of a device, and compare it with their plans.

One child for each case runs it on the device; one more, to which all devices are hidden, traces the same cases and
compares. They exchange files in one folder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants, write_calibration
from dryfit.plans.estimate import Device, Lengths, SegmentSource, Work, estimate, run_of
from dryfit.plans.timeline import Timeline
from dryfit.plans.tracer import Variant
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.execution import MemoryPlan
from dryfit.settings.files import read_model, write_model
from dryfit.settings.memory_terms import Calibration, Confidence
from dryfit.settings.plan_messages import CalibrateRequest, CalibrateResult, CaseComparison, MemoryCase, Observation
from dryfit.training.measured_step import observe
from dryfit.training.step_tracer import StepTracer, subject_task

_DOING = "calibrating"


@dataclass(frozen=True, slots=True)
class ErrorSpread:
    """Sizes of errors, without their signs."""

    median: float
    p95: float
    worst: float


def calibrate(body: CalibrateRequest, channel: ChildChannel) -> CalibrateResult:
    """Measure one case, or compare all that were measured.

    Raises:
        MachineError: There is no CUDA device to measure.
        ConfigError: Nothing was measured.
        TraceError: A case cannot be traced.
    """
    result = _measured(body.case, Path(body.folder)) if body.case else _compared(Path(body.folder), channel)
    if body.calibration_dir is not None and result.calibration is not None:
        write_calibration(Path(body.calibration_dir), result.calibration)
    return result


def planned(case: MemoryCase, device: Device) -> tuple[MemoryPlan, Timeline]:
    """Plan a case in a process that sees no device; return the plan and the run it is made from.

    Raises:
        TraceError: The case cannot be traced.
    """
    train, execution = case.subject.settings.train, case.execution
    work = Work(
        variant=Variant.of(execution),
        effective_batch=train.batch_size,
        micro_batch=execution.micro_batch,
        evaluation_rows=execution.eval_rows,
        lengths=Lengths(train.max_length),
        measured_rows=subject_task(case.subject).measured_rows(execution.eval_rows),
    )
    source = SegmentSource(StepTracer(case.subject, device.spec, reentrant=case.reentrant))
    return estimate(source, work, device), run_of(source, work, (train.max_length,) * 3, device)


def spread(errors: Sequence[float]) -> ErrorSpread:
    """Return the median, the 95th percentile (the smallest size that 95 % do not exceed) and the worst.

    Args:
        errors: At least one, of either sign.
    """
    sizes = sorted(abs(error) for error in errors)
    return ErrorSpread(median(sizes), sizes[math.ceil(0.95 * len(sizes)) - 1], sizes[-1])


def comparison(observation: Observation, plan: MemoryPlan) -> CaseComparison:
    """Compare a case as planned with the same case as observed."""
    return CaseComparison(
        name=observation.case.name,
        family=observation.case.family,
        planned_allocated_bytes=plan.peak_allocated_bytes,
        observed_allocated_bytes=observation.peak_allocated_bytes,
        planned_reserved_bytes=plan.peak_reserved_bytes,
        observed_reserved_bytes=observation.peak_reserved_bytes,
        planned_min_cap_bytes=plan.min_cap_bytes,
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


def _measured(case: MemoryCase, folder: Path) -> CalibrateResult:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        raise MachineError(
            _DOING,
            f"torch {torch.__version__} finds no CUDA device",
            allowed="a machine with a CUDA device and a CUDA build of torch",
            hint="plans need no calibration: without one their confidence is `uncalibrated`",
        )
    observation = observe(case)
    write_model(folder / f"{case.name}.json", observation)
    return CalibrateResult(observation=observation)


def _compared(folder: Path, channel: ChildChannel) -> CalibrateResult:
    torch.set_num_threads(1)
    paths = sorted(folder.glob("*.json"))
    observations = [observation for path in paths if (observation := read_model(path, Observation)) is not None]
    if not observations:
        raise ConfigError(_DOING, f"nothing was measured in {folder}", "one observation at least")
    workspace_bytes = measured_workspace(observations)
    comparisons: list[CaseComparison] = []
    for observation in observations:
        # The plan is the one that will be made once this calibration is known: with its workspace, not the table's.
        constants = DeviceConstants(observation.context_bytes, workspace_bytes, Confidence.CALIBRATED)
        plan, _ = planned(
            observation.case,
            Device(observation.device, constants, AllocatorSettings.of(observation.case.allocator), torch.__version__),
        )
        comparisons.append(comparison(observation, plan))
        channel.beat()
    return CalibrateResult(calibration=calibration_of(observations, comparisons), comparisons=tuple(comparisons))
