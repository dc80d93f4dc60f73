"""Child job CALIBRATE: measure what training steps take of a device, and compare it with their plans.

One child for each case runs it on the device; one more, to which all devices are hidden, traces the same cases and
compares. They exchange files in one folder.
"""

from pathlib import Path

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.jobs.calibration import CaseComparison, MemoryCase, Observation
from dryfit.core.jobs.memory import Confidence, MemoryPlan
from dryfit.core.jobs.plan import CalibrateRequest, CalibrateResult
from dryfit.core.wire import Phase, read_model, write_model
from dryfit.memory.allocator.settings import AllocatorSettings
from dryfit.memory.allocator.snapshot import read_snapshot
from dryfit.memory.planning.comparison import calibration_of, comparison, measured_workspace
from dryfit.memory.planning.constants import DeviceConstants, write_calibration
from dryfit.memory.planning.estimate import Device, Lengths, Work, estimate, run_of
from dryfit.memory.planning.segment_source import SegmentSource
from dryfit.memory.planning.timeline import Timeline
from dryfit.memory.tracing.tracer import Variant
from dryfit.train.rehearsal.observing import observe
from dryfit.train.rehearsal.step_tracer import StepTracer
from dryfit.train.rehearsal.subjects import subject_task

_DOING = "calibrating"


def calibrate(body: CalibrateRequest, channel: ChildChannel) -> CalibrateResult:
    """Measure one case, or compare all that were measured.

    Raises:
        MachineError: There is no CUDA device to measure.
        ConfigError: Nothing was measured.
        TraceError: A case cannot be traced.
    """
    channel.send(Phase(name="load"))
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
        variant=Variant(
            execution.checkpointing,
            execution.optimizer_impl,
            execution.offload_optimizer,
            bool(execution.chunked_loss),
            execution.offload_activations,
        ),
        effective_batch=train.batch_size,
        micro_batch=execution.micro_batch,
        evaluation_rows=execution.eval_rows,
        lengths=Lengths(train.max_length),
        measured_rows=subject_task(case.subject).measured_rows(execution.eval_rows),
    )
    source = SegmentSource(StepTracer(case.subject, device.spec, reentrant=case.reentrant))
    return estimate(source, work, device), run_of(source, work, (train.max_length,) * 3, device)


def _measured(case: MemoryCase, folder: Path) -> CalibrateResult:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        raise MachineError(
            _DOING,
            f"torch {torch.__version__} finds no CUDA device",
            allowed="a machine with a CUDA device and a CUDA build of torch",
            hint="plans need no calibration: without one their confidence is `uncalibrated`",
        )
    observation = observe(case, folder / f"{case.name}.pickle")
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
        plan, run = planned(
            observation.case,
            Device(observation.device, constants, AllocatorSettings.of(observation.case.allocator), torch.__version__),
        )
        history = folder / f"{observation.case.name}.pickle"
        recorded = read_snapshot(history) if history.exists() else None
        comparisons.append(comparison(observation, plan, run, recorded))
        channel.beat()
    return CalibrateResult(calibration=calibration_of(observations, comparisons), comparisons=tuple(comparisons))
