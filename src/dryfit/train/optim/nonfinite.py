"""Find where a loss or a gradient stopped being finite, after it happened, so that no step pays for it."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dryfit.core.errors import NonFiniteError
from dryfit.meta.construction.walk import floats_of
from dryfit.tasks.base import Batch, Loss
from dryfit.train.optim.step import micro_batches

_HINT = "a smaller optim.lr, a longer sched.warmup_ratio or a smaller regularization.max_grad_norm"


def non_finite(
    doing: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: float,
    norm: float,
    scale: float | None,
    origin: str = "",
) -> NonFiniteError:
    """Return the error of a loss or gradient that is not finite, with where it began.

    Args:
        doing: Which step of how many.
        model: With its gradients, not yet clipped: clipping by a NaN makes all of them NaN.
        optimizer: Whose groups say each parameter's learning rate.
        loss: The step's.
        norm: Of all gradients.
        scale: fp16's loss scale; None in other precisions.
        origin: Where the loss stopped being finite, as far as it is known.
    """
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    named = list(model.named_parameters())
    bad = [(name, parameter) for name, parameter in named if _not_finite(parameter.grad)]
    rate = float(optimizer.param_groups[0]["lr"])
    where = f"; {origin}" if origin else ""
    if not where and bad:
        # The backward pass goes from the loss to the inputs: of all that have a bad gradient, the last began it.
        name, parameter = bad[-1]
        rate = float(rates.get(id(parameter), rate))
        with_gradient = sum(parameter.grad is not None for _, parameter in named)
        where = f"; of {with_gradient} tensors {len(bad)} have such a gradient, {name} the nearest to the loss"
    scaled = f", loss scale {scale:g}" if scale is not None else ""
    problem = f"loss {loss}, gradient norm {norm}, learning rate {rate:.3g}{scaled}{where}"
    return NonFiniteError(doing, problem, hint=_HINT)


def loss_origin(model: nn.Module, batch: Batch, task: Loss, micro_batch: int) -> str:
    """Return where a forward pass without dropout stops being finite; empty where it does not, or cannot be repeated.

    Args:
        model: As it was when the loss was computed.
        batch: Of the step, on the model's device.
        task: Names the model's inputs.
        micro_batch: Rows at once.
    """
    weight = next((name for name, parameter in model.named_parameters() if _not_finite(parameter)), None)
    if weight is not None:
        return f"the weights {weight} are not finite themselves"
    was_training = model.training
    model.eval()
    try:
        for number, micro in enumerate(micro_batches(batch, micro_batch, task.padded), 1):
            name = _first_bad_output(model, {name: micro[name] for name in task.inputs if name in micro})
            if name is not None:
                return f"the output of {name or 'the model'} is not finite, first in micro-batch {number}"
    finally:
        model.train(was_training)
    return ""


def _first_bad_output(model: nn.Module, inputs: Batch) -> str | None:
    bad: list[str] = []

    def look(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not bad and any(_not_finite(tensor) for tensor in floats_of(output)):
            bad.append(name)

    handles = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()]
    try:
        # The trial is over: another pass that fails, as on a device without memory for it, must not become its reason.
        with torch.no_grad(), suppress(RuntimeError, LookupError, ValueError, TypeError):
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else None


def _not_finite(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor has an infinite or NaN value; for an FSDP shard, on any rank: all must call it."""
    if tensor is None or not tensor.is_floating_point():
        return False
    if not isinstance(tensor, DTensor):
        return not bool(torch.isfinite(tensor).all())
    bad = (~torch.isfinite(tensor.to_local())).any().int()
    dist.all_reduce(bad, dist.ReduceOp.MAX, tensor.device_mesh.get_group())
    return bool(bad)
