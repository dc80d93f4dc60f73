"""Validation: when, over which batches, and what follows from its history."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from dryfit.core.choices import Direction
from dryfit.core.errors import ConfigError
from dryfit.core.trial import MetricPoint, best_point
from dryfit.tasks.base import MODEL_INPUTS, Batch, Task
from dryfit.tasks.guard import BatchGuard
from dryfit.tasks.tokens import TokenSet
from dryfit.train.batches import evaluation_batches

_MOST_ROWS = 64
_ROWS_PER_TRAINING_ROW = 4


def evaluation_steps(*, steps_per_epoch: int, evals_per_epoch: int, epochs: int) -> frozenset[int]:
    """Optimizer steps (counted from 1) after which to validate: evenly spaced, the last at each epoch's end.

    Raises:
        ConfigError: More validations than steps are asked for.
    """
    if evals_per_epoch > steps_per_epoch:
        raise ConfigError(
            "planning the validations",
            f"train.evals_per_epoch is {evals_per_epoch} and an epoch has {steps_per_epoch} steps",
            allowed=f"1 to {steps_per_epoch} with this batch size and these rows",
        )
    within = [-(-steps_per_epoch * k // evals_per_epoch) for k in range(1, evals_per_epoch + 1)]
    return frozenset(epoch * steps_per_epoch + step for epoch in range(epochs) for step in within)


def evaluation_rows(micro_batch: int) -> int:
    """Rows validated at once: several times the training rows, as no activation is kept for a backward pass."""
    return min(_MOST_ROWS, _ROWS_PER_TRAINING_ROW * micro_batch)


def evaluate(
    model: nn.Module,
    tokens: TokenSet,
    task: Task,
    *,
    batch_rows: int,
    beat: Callable[[], None],
    guard: BatchGuard | None = None,
) -> dict[str, float]:
    """Compute a task's metrics on a split. Draws no random number; leaves the model in eval mode.

    Args:
        model: On its device.
        tokens: The split.
        task: Makes batches and computes metrics.
        batch_rows: Rows at once.
        beat: Called once a batch, as a sign of life.
        guard: Looks at each batch and at its outputs.

    Raises:
        DataError: The guard finds a batch that the model has no place for.
        ConfigError: It finds outputs that are no scores of the rows.
    """
    model.eval()
    outputs = outputs_in_order(
        model, tokens, partial(task.collate, tokens), batch_rows=batch_rows, beat=beat, guard=guard
    )
    return task.metrics(outputs.float(), tokens)


def outputs_in_order(
    model: nn.Module,
    tokens: TokenSet,
    collate: Callable[[Sequence[int]], Batch],
    *,
    batch_rows: int,
    beat: Callable[[], None],
    guard: BatchGuard | None = None,
) -> torch.Tensor:
    """A model's outputs for every row, with rows of similar length batched together.

    Args:
        model: On its device, in eval mode.
        tokens: The rows.
        collate: Makes the batch of some of them.
        batch_rows: Rows at once.
        beat: Called once a batch, as a sign of life.
        guard: Looks at each batch and at its outputs.

    Returns:
        (rows, ...), in the order of the rows, in the model's own number format, on the CPU.

    Raises:
        DataError: As :func:`evaluate`.
        ConfigError: As :func:`evaluate`.
    """
    device = next(model.parameters()).device
    outputs: list[torch.Tensor] = []
    order: list[int] = []
    with torch.inference_mode():
        for rows in evaluation_batches(tokens.lengths_R, batch_rows):
            batch = collate(rows)
            if guard is not None:
                guard.check_batch(batch, lambda rows=rows: rows)
            found = model(**{name: batch[name].to(device) for name in MODEL_INPUTS if name in batch})
            if guard is not None:
                guard.check_outputs(found, len(rows), lambda rows=rows: rows)
            outputs.append(found.cpu())
            order += rows
            beat()
    in_order = torch.cat(outputs)
    in_order[torch.tensor(order)] = in_order.clone()
    return in_order


def stopped_early(points: tuple[MetricPoint, ...], *, patience: int, direction: Direction) -> bool:
    """Whether the last ``patience`` validations brought nothing better; 0 never stops."""
    if patience == 0:
        return False
    best = best_point(points, direction)
    since_best = len(points) - 1 - best.n if best else len(points)
    return since_best >= patience
