"""One step's gradients: the effective batch in micro-batches, equal to the whole batch up to rounding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from dryfit.tasks.base import Batch, Loss, Outputs


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What a backward pass over one effective batch gave.

    Attributes:
        loss: The batch's mean loss, detached, 0-dimensional.
        micro_batches: Forward and backward passes done.
    """

    loss: torch.Tensor
    micro_batches: int


def backward_batch(
    model: nn.Module,
    batch: Batch,
    task: Loss,
    *,
    micro_batch: int,
    backward: Callable[[torch.Tensor], None],
    autocast: Callable[[], AbstractContextManager[object]],
    check: Callable[[Outputs, int, int], None] | None = None,
) -> StepLoss:
    """Add the gradients of an effective batch to the model's.

    Each micro-batch's loss *sum* is divided by the *whole* batch's normaliser. A mean over micro-batch means would
    be another loss wherever micro-batches weigh differently (class weights, a short last one).

    Args:
        model: Takes the batch's model inputs, returns outputs.
        batch: The effective batch, on the model's device.
        task: Gives loss sum and normaliser.
        micro_batch: Rows in memory at once.
        backward: Backpropagates a scalar (accelerate's scales it for fp16).
        autocast: Context of the forward pass.
        check: Given each micro-batch's outputs, its first row and its number of rows, before its loss.
    """
    weight = task.batch_weight(batch)
    losses: list[torch.Tensor] = []
    first = 0
    for micro in micro_batches(batch, micro_batch, task.padded):
        with autocast():
            outputs = model(**{name: micro[name] for name in task.inputs if name in micro})
            if check is not None:
                check(outputs, first, len(micro["attention_mask"]))
            first += len(micro["attention_mask"])
            parts = task.loss_sum(outputs, micro)
            loss = parts / weight.to(parts.dtype)
            loss = loss if loss.ndim == 0 else loss.sum()
        backward(loss)
        losses.append(loss.detach())
    return StepLoss(loss=torch.stack(losses).sum(), micro_batches=len(losses))


def micro_batches(batch: Batch, rows: int, padded: Sequence[str]) -> Iterator[Batch]:
    """Cut a batch into micro-batches; the last one may be short.

    Args:
        batch: The effective batch.
        rows: Of each micro-batch.
        padded: Entries that are trimmed to the longest row of each.
    """
    count = len(batch["attention_mask"])
    if rows >= count:
        yield batch
        return
    # One transfer for all widths: reading each micro-batch's own would wait for the device each time.
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    for start in range(0, count, rows):
        width = max(lengths[start : start + rows])
        yield {
            name: values[start : start + rows, :width] if name in padded else values[start : start + rows]
            for name, values in batch.items()
        }
