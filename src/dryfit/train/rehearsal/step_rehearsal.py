"""A trial's training step, taken apart, so that it can be run on tensors that are not there.

What surrounds the model in a real step is done by Hugging Face's Trainer and Accelerate inline in their loops. Here it
is repeated, operator for operator: autocast around the model's forward pass, its outputs cast to fp32, the loss
scaler of fp16, clipping, the norm's reading, the optimizer, the end of the gradients. A contract test compares both.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from dryfit.core.jobs.memory import StepPhase
from dryfit.core.settings.choices import Precision
from dryfit.memory.tracing.events import Shape
from dryfit.tasks.base import DTYPES, Batch
from dryfit.train.optimizer import OptimizerPlan
from dryfit.train.rehearsal.subjects import StepParts
from dryfit.train.step import backward_batch


class Rehearsal:
    """Runs the parts of a training step, one after another.

    Args:
        parts: What it works on; the model's tensors are on ``device``, fake or real.
        device: ``cuda`` or ``cpu``.
        plan: How the optimizer does its work, from its next start on.
    """

    def __init__(self, parts: StepParts, device: str, plan: OptimizerPlan) -> None:
        self.parts = parts
        self.device = device
        self.plan = plan
        precision = parts.settings.train.precision
        self.scaler = torch.amp.GradScaler(device) if precision is Precision.FP16 else None  # pyright: ignore
        self.optimizer: torch.optim.Optimizer | None = None
        if precision is not Precision.FP32:
            _autocast_forward(parts.model, device, DTYPES[precision])

    def batch(self, shape: Shape) -> Batch:
        """A batch on the device, its values unset."""
        sizes = self.parts.batch_sizes(shape.rows, shape.length)
        return {name: torch.empty(size, dtype=torch.int64, device=self.device) for name, size in sizes.items()}

    def micro(self, batch: Batch, phases: Callable[[StepPhase], None]) -> None:
        """Forward and backward of one micro-batch.

        Args:
            batch: Its rows.
            phases: Told the phases as they begin.
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
        """Clipping, the optimizer's step and the end of the gradients."""
        phases(StepPhase.CLIP)
        if self.optimizer is None:
            self.optimizer = self.parts.optimizer(self.plan)
        most = self.parts.settings.regularization.max_grad_norm or float("inf")
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = self.parts.layout.gradient_norm(self.parts.model)
        nn.utils.clip_grads_with_norm_(self.parts.model.parameters(), most, norm)
        float(norm)
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
        # Inference mode of the real run keeps no more and no less; fake tensors know this one better.
        task = self.parts.task
        with torch.no_grad():
            outputs = self.parts.model(**{name: batch[name] for name in task.inputs if name in batch})
            task.keep(outputs, batch).cpu()

    def measure(self, shape: Shape) -> None:
        """What a task's metrics ask of the model beyond that; without autocast, as a validation does it."""
        self.parts.model.eval()
        self.parts.task.rehearse_measure(self.parts.model, shape.rows, shape.length)

    def save(self) -> None:
        """Copy everything that a checkpoint holds to the host."""
        self.parts.layout.copy_checkpoint(self.parts.model, self.optimizer)


def _autocast_forward(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Wrap the forward pass as ``Accelerator.prepare_model`` does for mixed precision."""
    forward: Any = type(model).forward
    inner = torch.autocast(device, dtype=dtype)(forward)
    model.forward = MethodType(convert_outputs_to_fp32(inner), model)
