"""One step's gradients: the effective batch in micro-batches, equal to the whole batch up to rounding.

The host waits for its device once a step, where it reads the loss and the norm of the gradients (:func:`numbers`):
until then it is free to queue the kernels that come next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from dryfit.parallel.layout.portions import Portion, portions
from dryfit.tasks.base import Batch, Loss, Outputs


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
