"""One step's gradients: the effective batch in micro-batches, equal to the whole batch up to rounding."""

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
        batch: The effective batch, on the model's device.
        task: Gives loss sum and normaliser.
        micro_batch: Rows in memory at once; or which rows go through the model here, where others have the rest.
        backward: Backpropagates a scalar (accelerate's scales it for fp16).
        autocast: Context of the forward pass.
        check: Given each micro-batch's outputs, its first row and its number of rows, before its loss.

    Returns:
        The batch's mean loss, detached, 0-dimensional.
    """
    weight = task.batch_weight(batch)
    losses: list[torch.Tensor] = []
    here = portions(len(batch["attention_mask"]), micro_batch) if isinstance(micro_batch, int) else micro_batch
    for portion, micro in zip(here, micro_batches(batch, here, task.padded), strict=True):
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
    if [portion.rows for portion in wanted] == [count]:
        yield batch
        return
    # One transfer for all widths: reading each micro-batch's own would wait for the device each time.
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    for portion in wanted:
        chosen = slice(portion.first, portion.first + portion.rows)
        width = max(lengths[chosen])
        yield {name: values[chosen, :width] if name in padded else values[chosen] for name, values in batch.items()}
