"""A trial's training step in separate parts, which also run on tensors without data.

Hugging Face's Trainer and Accelerate do what surrounds the model inline in their loops. It is repeated here, operator
for operator: autocast around the forward pass, outputs cast to fp32, fp16's loss scaler, clipping, reading the norm,
the optimizer, freeing the gradients. A contract test compares both.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from dryfit.core.jobs.memory import StepPhase
from dryfit.core.settings.choices import Precision
from dryfit.memory.tracing.events import Shape
from dryfit.meta.loading.frozen_weights import DTYPES
from dryfit.parallel.layout.model_slices import whole_state
from dryfit.tasks.base import Batch
from dryfit.train.optim.optimizer import OptimizerPlan
from dryfit.train.optim.step import backward_batch, numbers
from dryfit.train.rehearsal.subjects import StepParts


class Rehearsal:
    """Runs the parts of a training step, one after another.

    Args:
        parts: Model, task and optimizer; the model's tensors are on ``device``, fake or real.
        device: ``cuda`` or ``cpu``.
        plan: How the optimizer works, from its next start on.
    """

    def __init__(self, parts: StepParts, device: str, plan: OptimizerPlan) -> None:
        self.parts = parts
        self.device = device
        self.plan = plan
        precision = parts.settings.train.precision
        self.scaler = torch.amp.GradScaler(device) if precision is Precision.FP16 else None  # pyright: ignore
        self.optimizer: torch.optim.Optimizer | None = None
        if precision.is_half:
            _autocast_forward(parts.model, device, DTYPES[precision])

    def batch(self, shape: Shape) -> Batch:
        """Return a batch on the device, without values."""
        sizes = self.parts.batch_sizes(shape.rows, shape.length)
        return {name: torch.empty(size, dtype=torch.int64, device=self.device) for name, size in sizes.items()}

    def micro(self, batch: Batch, phases: Callable[[StepPhase], None]) -> None:
        """Run forward and backward passes of one micro-batch.

        Args:
            batch: Its rows.
            phases: Called with each phase as it begins.
        """
        self.parts.model.train()

        def backward(loss: torch.Tensor) -> None:
            phases(StepPhase.BACKWARD)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        phases(StepPhase.FORWARD)
        rows = len(batch["attention_mask"])
        backward_batch(
            self.parts.model, batch, self.parts.task, micro_batch=rows, backward=backward, autocast=nullcontext
        )

    def update(self, phases: Callable[[StepPhase], None]) -> None:
        """Clip, step the optimizer and free the gradients."""
        phases(StepPhase.CLIP)
        if self.optimizer is None:
            self.optimizer = self.parts.optimizer(self.plan)
        most = self.parts.settings.regularization.max_grad_norm or float("inf")
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = self.parts.layout.gradient_norm(self.parts.model)
        numbers(norm, norm)  # in the place of the norm and the loss
        nn.utils.clip_grads_with_norm_(self.parts.model.parameters(), most, norm)
        phases(StepPhase.OPTIMIZER)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.parts.model.zero_grad()

    def evaluate(self, batch: Batch) -> None:
        """Score one validation batch."""
        self.parts.model.eval()
        # The real run's inference mode keeps as much; fake tensors support no_grad better.
        task = self.parts.task
        with torch.no_grad():
            outputs = self.parts.model(**{name: batch[name] for name in task.inputs if name in batch})
            task.keep(outputs, batch).cpu()

    def measure(self, shape: Shape) -> None:
        """Run what the task's metrics need besides scores, without autocast, as a validation does."""
        self.parts.model.eval()
        self.parts.task.rehearse_measure(self.parts.model, shape.rows, shape.length)

    def save(self) -> None:
        """Copy everything that a checkpoint holds to the host, one tensor after another, sharded ones gathered."""
        model, gathered = self.parts.model, self.parts.layout.gathered(self.parts.model)
        whole_state(model, lambda name, local: gathered(name, local).contiguous(), keep=True)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, state in self.optimizer.state.items() if self.optimizer is not None else ():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    of_weight = value.shape == parameter.shape
                    (gathered(names[id(parameter)], value) if of_weight else value).detach().cpu()


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch garbage collection off, so that objects die at the same place in every run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _autocast_forward(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Wrap the forward pass as ``Accelerator.prepare_model`` does for mixed precision."""
    forward: Any = type(model).forward
    inner = torch.autocast(device, dtype=dtype)(forward)
    model.forward = MethodType(convert_outputs_to_fp32(inner), model)
