"""Gradients of one step, and what is said where a loss or gradient is not finite."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dryfit.gpu.slots import floats_of
from dryfit.parallel.layout import Portion, portions
from dryfit.settings.errors import NonFiniteError
from dryfit.settings.memory_terms import DeviceKind
from dryfit.tasks.base import Batch, Loss, Outputs
from dryfit.tasks.guard import BatchGuard
from dryfit.training.run import TrialParts

# The note added to an error that ends training: its step, rows and configuration, and never a row's text.


@final
class ErrorContext(AbstractContextManager[None]):
    """Keeps track of where a run is, and adds that as a note to an exception that leaves the block.

    The batch is kept on the host, so the note never asks a device, which may be dead by then.

    Args:
        parts: The run.
        guards: Of its splits: each knows the batch it checked last.
    """

    def __init__(self, parts: TrialParts, *guards: BatchGuard) -> None:
        self._parts = parts
        self._guards = guards
        self._portions: Sequence[Portion] = ()
        self._micro = 0
        self.step = 0

    def begin_batch(self, step: int, portions: Sequence[Portion]) -> None:
        """The gradients of a step are computed from now on, portion by portion; steps count from 1."""
        self.step, self._portions, self._micro = step, portions, 0

    def end_micro_batches(self) -> None:
        """All of the batch went through the model."""
        self._micro = 0

    def end_batch(self) -> None:
        """Forget the batch."""
        self._micro = 0
        for guard in self._guards:
            guard.forget()

    def begin_micro_batch(self) -> None:
        """The next micro-batch of the step goes through the model from now on."""
        self._micro += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the note; the exception goes on."""
        if error is not None:
            with suppress(OSError, RuntimeError, ValueError, LookupError):  # it must not take the error's place
                error.add_note(self.text())

    def text(self) -> str:
        """Return where the run is, in words."""
        config, plan = self._parts.request.config, self._parts.request.plan
        batches = [text for text in (guard.describe(self._current_rows()) for guard in self._guards) if text]
        searched = ", ".join(f"{key} = {value}" for key, value in config.params.items())
        micro = f", micro-batch {self._micro} of {len(self._portions)}" if self._exact and self._micro else ""
        place = (
            f"at optimizer step {self.step} of {self._parts.last_step}{self._parts.position}{micro if batches else ''}"
        )
        how = f"{plan.effective_batch} rows a step, {plan.micro_batch} at once, seed {config.seed}"
        trial = f"trial {config.number}: {searched or 'nothing searched'}"
        return "\n".join([place, *batches, trial, f"on {plan.device} in {config.settings.train.precision}, {how}"])

    @property
    def _exact(self) -> bool:
        """Whether the host is where the device is: elsewhere it may be some micro-batches ahead."""
        return self._parts.request.plan.device is DeviceKind.CPU or self._parts.request.diagnostic

    def _current_rows(self) -> slice:
        """Return the rows of the current micro-batch, or of the whole batch where that is not known."""
        if not (self._exact and self._micro):
            return slice(None)
        portion = self._portions[self._micro - 1]
        return slice(portion.first, portion.first + portion.rows)


# One step's gradients: the effective batch in micro-batches, equal to the whole batch up to rounding.
#
# The host waits for its device once a step, where it reads the loss and the norm of the gradients (:func:`numbers`):
# until then it is free to queue the kernels that come next.


def backward_batch(
    model: nn.Module,
    batch: Batch,
    task: Loss,
    *,
    micro_batch: int | Sequence[Portion],
    backward: Callable[[torch.Tensor], None],
    autocast: Callable[[], AbstractContextManager[object]],
    check: Callable[[Outputs, int, int], None] | None = None,
) -> torch.Tensor:
    """Add the gradients of an effective batch to the model's.

    Each micro-batch's loss *sum* is divided by the *whole* batch's normaliser. A mean over micro-batch means would
    be another loss wherever micro-batches weigh differently (class weights, a short last one).

    Args:
        model: Takes the batch's model inputs, returns outputs.
        batch: The effective batch, on the host or on the model's device.
        task: Gives loss sum and normaliser.
        micro_batch: Rows in memory at once; or which rows go through the model here, where others have the rest.
        backward: Backpropagates a scalar (accelerate's scales it for fp16).
        autocast: Context of the forward pass.
        check: Given each micro-batch's outputs, its first row and its number of rows, before its loss.

    Returns:
        The batch's mean loss, detached, 0-dimensional.
    """
    here = portions(len(batch["attention_mask"]), micro_batch) if isinstance(micro_batch, int) else micro_batch
    widths = _widths(batch, here)
    batch = on_device(batch, next(model.parameters()).device)
    weight = task.batch_weight(batch)
    losses: list[torch.Tensor] = []
    for portion, micro in zip(here, _cut(batch, here, widths, task.padded), strict=True):
        with autocast():
            outputs = model(**{name: micro[name] for name in task.inputs if name in micro})
            if check is not None:
                check(outputs, portion.first, portion.rows)
            parts = task.loss_sum(outputs, micro)
            loss = parts / weight.to(parts.dtype)
            loss = loss if loss.ndim == 0 else loss.sum()
            loss = loss if portion.weighs else loss * 0
        del outputs  # else a copy of all logits would live through the backward pass, and the next forward pass
        backward(loss)
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def micro_batches(batch: Batch, rows: int | Sequence[Portion], padded: Sequence[str]) -> Iterator[Batch]:
    """Split a batch into micro-batches; the last one may be short.

    Args:
        batch: The effective batch.
        rows: Of each micro-batch; or which ones.
        padded: Entries that are trimmed to the longest row of each.
    """
    count = len(batch["attention_mask"])
    wanted = portions(count, rows) if isinstance(rows, int) else rows
    return _cut(batch, wanted, _widths(batch, wanted), padded)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device. From page-locked memory it is copied while the host goes on."""
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def numbers(*tensors: torch.Tensor) -> list[float]:
    """Return the values of single numbers on one device, by one transfer: each read by itself waits for the device."""
    return [float(one) for one in torch.stack([one.detach().double() for one in tensors]).cpu().unbind()]


def _widths(batch: Batch, wanted: Sequence[Portion]) -> list[int]:
    """Return the longest row of each micro-batch; none where the batch is not cut. A device would be waited for."""
    mask_BL = batch["attention_mask"]
    if [portion.rows for portion in wanted] == [len(mask_BL)]:
        return []
    lengths = mask_BL.sum(dim=1).tolist()
    return [max(lengths[portion.first : portion.first + portion.rows]) for portion in wanted]


def _cut(batch: Batch, wanted: Sequence[Portion], widths: Sequence[int], padded: Sequence[str]) -> Iterator[Batch]:
    if not widths:
        yield batch
        return
    for portion, width in zip(wanted, widths, strict=True):
        chosen = slice(portion.first, portion.first + portion.rows)
        yield {name: values[chosen, :width] if name in padded else values[chosen] for name, values in batch.items()}


# Find where a loss or a gradient stopped being finite, after it happened, so that no step pays for it.


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
