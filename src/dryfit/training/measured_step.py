"""Steps run for real: measured for calibration, and timed beside others."""

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import nn

from dryfit.gpu.events import BLOCK_BYTES, Shape
from dryfit.gpu.private_apis.torch_cuda import (
    HISTORY,
    begin_history,
    clear_workspaces,
    end_history,
    note_phase,
    set_allocator,
    visible_devices,
)
from dryfit.gpu.slots import like, put_all
from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import PaceRequest, PaceResult
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, StepPhase
from dryfit.settings.plan_messages import MemoryCase, Observation, PartPeak
from dryfit.settings.private_names import require
from dryfit.settings.wire import Phase
from dryfit.tasks.base import Batch, Task
from dryfit.tasks.rows import TRAIN
from dryfit.training.batches import first_epoch, read_tokens, trial_task
from dryfit.training.device import ALLOCATOR_TEXTS, prepare_device
from dryfit.training.model import offload_layer_inputs, trial_parts
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.step_tracer import SubjectSteps, no_collection, step_parts
from dryfit.training.trainer import TrialSteps

# Run a calibration case for real, with random weights and rows, and measure the device's memory.
#
# A run has the order of a plan: loading, two steps, a validation, a third step, a checkpoint.


_DEVICE = 0
_TOKENS = (10, 30)
"""Range of random token ids: no padding, in every vocabulary."""
_PADDING_TOKENS = 5
_SCALE = 0.02
_SMI_TIMEOUT_S = 20.0
_MATRIX = 256


class Meter(Protocol):
    """Follows a run and measures memory."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of the run."""
        ...

    def phase(self, phase: StepPhase) -> None:
        """Note that a phase begins."""
        ...


@dataclass(slots=True)
class CudaMeter:
    """Measures each part's peak by torch's counters; phases go into the allocator's history."""

    parts: list[PartPeak] = field(default_factory=list[PartPeak])

    def __post_init__(self) -> None:
        torch.cuda.init()  # the allocator of a device that was never used has no place for metadata

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the run."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(_DEVICE)
        yield
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(_DEVICE), torch.cuda.max_memory_reserved(_DEVICE)
        self.parts.append(PartPeak(part=name, allocated_bytes=allocated, reserved_bytes=reserved))

    def phase(self, phase: StepPhase) -> None:
        """Note that a phase begins."""
        note_phase(phase.value)


def observe(case: MemoryCase, history: Path | None = None) -> Observation:
    """Run a case on the first CUDA device, in a process that has not used it yet.

    Args:
        case: What to run.
        history: File for the allocator's history; None: none is kept.

    Raises:
        torch.cuda.OutOfMemoryError: It does not fit.
    """
    others_bytes = used_before(_DEVICE)
    require("observing the memory of a device", HISTORY)
    set_allocator(ALLOCATOR_TEXTS[case.allocator])
    if history is not None:
        begin_history()
    meter = CudaMeter()
    steps = run_case(case, "cuda", meter)
    if history is not None:
        end_history(str(history))
    context_bytes = _outside_bytes() - others_bytes
    return Observation(
        case=case,
        device=device_spec(),
        torch=torch.__version__,
        parts=tuple(meter.parts),
        context_bytes=max(0, context_bytes),
        workspace_bytes=cublas_workspaces(),
        steps=steps,
    )


def run_case(case: MemoryCase, device: str, meter: Meter) -> int:
    """Load, step twice, validate, step, save.

    Args:
        case: What to run; weights and rows are random.
        device: ``cuda`` or ``cpu``.
        meter: Measures the run.

    Returns:
        Number of optimizer steps done.
    """
    torch.manual_seed(0)
    train, execution = case.subject.settings.train, case.execution
    parts = step_parts(
        case.subject,
        checkpointing=execution.checkpointing,
        reentrant=case.reentrant,
        chunked_loss=bool(execution.chunked_loss),
    )
    if execution.offload_activations:
        offload_layer_inputs(parts.model)
    meter.phase(StepPhase.LOAD)
    with meter.part("load"):
        fill(parts.model, device)
    plan = OptimizerPlan(impl=execution.optimizer_impl, offload=execution.offload_optimizer)
    made = SubjectSteps(parts, DeviceKind(device), plan, meter.phase)
    steps = 0
    for name in ("first step", "second step", "validation", "third step", "checkpoint"):
        gc.collect()
        with meter.part(name), no_collection():
            if name == "validation":
                meter.phase(StepPhase.EVALUATE)
                rows = execution.eval_rows
                made.evaluate(_rows(made, case, rows))
                if measured := parts.task.measured_rows(rows):
                    made.measure(Shape(measured, train.max_length))
            elif name == "checkpoint":
                meter.phase(StepPhase.SAVE)
                made.save()
            else:
                meter.phase(StepPhase.FORWARD)
                batch = _rows(made, case, train.batch_size)
                for start in range(0, train.batch_size, execution.micro_batch):
                    cut = slice(start, start + execution.micro_batch)
                    made.micro({key: values[cut] for key, values in batch.items()})
                made.update()
                del batch
                steps += 1
    return steps


def fill(model: nn.Module, device: str) -> None:
    """Give a model memory on a device: small random weights, zeros in integer tensors. Ties stay."""
    put_all(model, lambda slot: _values(slot.tensor, device))


def device_spec() -> DeviceSpec:
    """Return the first CUDA device's properties."""
    device = torch.cuda.get_device_properties(_DEVICE)
    return DeviceSpec(name=device.name, capacity_bytes=device.total_memory, capability=(device.major, device.minor))


def used_before(device: int) -> int:
    """Return the bytes in use on a device before this process has a context there; 0 without ``nvidia-smi``.

    Args:
        device: Index among all devices of the machine, or 0 where ``CUDA_VISIBLE_DEVICES`` names one.
    """
    visible = visible_devices()
    name = str(visible[device]) if len(visible) > device else str(device)
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", name]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
        return int(output.splitlines()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def cublas_workspaces() -> tuple[int, int]:
    """Return the bytes that cuBLAS keeps after the first product of this thread and of autograd's."""
    gc.collect()
    clear_workspaces()
    factor = torch.ones(_MATRIX, _MATRIX, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated(_DEVICE)
    product = factor @ factor
    forward = torch.cuda.memory_allocated(_DEVICE) - before - _blocks(product)
    seed = torch.ones_like(product)
    before = torch.cuda.memory_allocated(_DEVICE)
    product.backward(seed)
    assert factor.grad is not None
    backward = torch.cuda.memory_allocated(_DEVICE) - before - _blocks(factor.grad)
    return max(0, forward), max(0, backward)


def _outside_bytes() -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info(_DEVICE)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(_DEVICE)


def _blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // BLOCK_BYTES) * BLOCK_BYTES


def _values(old: torch.Tensor, device: str) -> torch.Tensor:
    new = like(old, device)
    return new.normal_(0, _SCALE) if old.is_floating_point() else new.zero_()


def _rows(made: SubjectSteps, case: MemoryCase, rows: int) -> Batch:
    """Return a batch with values, filled in place, so that nothing else is allocated."""
    batch = made.batch(Shape(rows, case.subject.settings.train.max_length))
    for name, values in batch.items():
        match name:
            case "attention_mask":
                values.fill_(1)
                if case.padded:
                    values[1:, -_PADDING_TOKENS:].fill_(0)
            case "input_ids":
                values.random_(*_TOKENS)
            case "labels":
                values.random_(*_label_range(made.parts.task, batch))
            case _ if name.endswith("_mask"):
                values.fill_(1)
            case _:
                values.zero_()
    return batch


def _label_range(task: Task, batch: Batch) -> tuple[int, int]:
    """Return the range of labels: classes, tokens, or the first position of a row."""
    labels = batch["labels"]
    if task.classes is not None:
        return 0, task.classes if labels.ndim == 1 else 2
    return _TOKENS if labels.shape == batch["input_ids"].shape else (0, 1)


# Child job PACE: time optimizer steps of a trial, beside other children that do the same.


_MEETING_S: Final = 10.0
_POLL_S: Final = 0.002


def pace(body: PaceRequest, channel: ChildChannel) -> PaceResult:
    """Time steps of a trial's first batch.

    Raises:
        DryfitError: The model or its rows cannot be read.
    """
    trial = body.trial
    torch.set_num_threads(trial.plan.threads)
    prepare_device(trial.plan, os.environ)
    tokens = read_tokens(trial, trial_task(trial.config), only=None)
    steps = TrialSteps(trial_parts(trial, channel, tokens))
    task, size = trial_task(trial.config, tokens), trial.config.settings.train.batch_size
    batches = first_epoch(task, tokens.splits[TRAIN], seed=trial.config.seed, batch_size=size, group_by_length=False)
    first = batches[0][: body.rows]
    steps.trainer.micro_batch = len(first)
    channel.send(Phase(name="train"))
    _seconds(steps, first)
    together = _meet(Path(body.meeting), body.child, body.side_by_side)
    times_s: list[float] = []
    while sum(times_s) < body.measured_s:
        times_s.append(_seconds(steps, first))
    return PaceResult(step_s=statistics.median(times_s), steps=len(times_s), together=together)


def _seconds(steps: TrialSteps, rows: list[int]) -> float:
    began_s = time.perf_counter()
    steps.gradients(rows)
    steps.update()
    return time.perf_counter() - began_s


def _meet(folder: Path, child: int, side_by_side: int) -> bool:
    """Wait until all children have come so far; False: some did not in time."""
    (folder / str(child)).touch()
    deadline_s = time.monotonic() + _MEETING_S
    while len(list(folder.iterdir())) < side_by_side:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
