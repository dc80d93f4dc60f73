"""Validation: its steps, its batches, its metrics, and early stopping."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from dryfit.settings.choices import Direction
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import TrainSettings
from dryfit.settings.trial import MetricPoint, better
from dryfit.tasks.base import Batch, Measured, Outputs, Task, TaskModel, TellsRows
from dryfit.tasks.guard import BatchGuard
from dryfit.tasks.row_metrics import collapsed
from dryfit.tasks.scored_rows import ScoredRow, joined
from dryfit.tasks.tokens import TokenSet
from dryfit.training.batches import evaluation_batches
from dryfit.training.step import on_device


def evaluation_steps(*, steps_per_epoch: int, evals_per_epoch: int, epochs: int) -> frozenset[int]:
    """Return the optimizer steps (counted from 1) after which to validate: evenly spaced, the last at each epoch's end.

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


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        metrics: Of the split.
        fitted: What the task fitted on it, or got from the validation split.
        collapsed: In words how all rows got the same answer; empty: they did not, or the task does not tell rows.
        rows: Each row with its answer; empty where the task does not tell them.
    """

    metrics: dict[str, float]
    fitted: Mapping[str, float]
    collapsed: str = ""
    rows: tuple[ScoredRow, ...] = field(default=(), repr=False)

    @property
    def numbers(self) -> "Evaluated":
        """The same without the rows, for other processes."""
        return replace(self, rows=())

    def require(self, names: Sequence[str], task: Task) -> None:
        """Refuse metrics that lack what a study asked for.

        Raises:
            ConfigError: They do.
        """
        missing = [name for name in names if name not in self.metrics]
        if missing:
            what = type(task).__name__
            raise ConfigError(
                "validating",
                f"{what}.metrics gave {', '.join(self.metrics) or 'nothing'}, and not {', '.join(missing)}",
                f"every name that {what}.metric_names says: {', '.join(task.metric_names())}",
            )


def evaluate(
    model: TaskModel,
    tokens: TokenSet,
    task: Task,
    *,
    batch_rows: int,
    beat: Callable[[], None],
    guard: BatchGuard | None = None,
    fitted: Mapping[str, float] | None = None,
) -> Evaluated:
    """Compute a task's metrics on a split. Draws no random number; leaves the model in eval mode.

    Args:
        model: On its device.
        tokens: The split.
        task: Makes batches and computes metrics.
        batch_rows: Rows at once.
        beat: Called once a batch, as a sign of life.
        guard: Checks each batch and its outputs.
        fitted: What was chosen on the validation split; None: this is that split, choose now.

    Raises:
        DataError: The guard finds a batch that the model has no place for.
        ConfigError: It finds outputs that are no scores of the rows.
    """
    model.eval()
    collate = partial(task.collate, tokens)
    kept = kept_in_order(
        model, tokens, task, collate, batch_rows=batch_rows, after=lambda *_: beat(), guard=guard
    ).float()
    fitted = task.fit(kept, tokens) if fitted is None else fitted
    measured = task.measure(model, tokens, batch_rows=batch_rows, beat=beat)
    measured = measured if isinstance(measured, Measured) else Measured(measured)
    metrics = {**task.metrics(kept, tokens, fitted), **measured.metrics}
    told = enumerate(task.scored_rows(kept, tokens, fitted)) if isinstance(task, TellsRows) else ()
    rows = tuple(joined(row, measured.rows[index]) if index in measured.rows else row for index, row in told)
    plain = {name: float(value) for name, value in metrics.items()}
    return Evaluated(plain, dict(fitted), collapsed(rows, task.context.data.labels), rows)


def kept_in_order(
    model: nn.Module,
    tokens: TokenSet,
    task: Task,
    collate: Callable[[Sequence[int]], Batch],
    *,
    batch_rows: int,
    after: Callable[[Sequence[int], Outputs, Batch], None],
    guard: BatchGuard | None = None,
) -> torch.Tensor:
    """Return what a task keeps of a model's outputs for every row; rows of similar length are batched together.

    Args:
        model: On its device, in eval mode.
        tokens: The rows.
        task: Names the model's inputs, and what is kept.
        collate: Makes the batch of some rows.
        batch_rows: Rows at once.
        after: Called once a batch, with its rows, the outputs, and the batch on the model's device.
        guard: Checks each batch and its outputs.

    Returns:
        (rows, K), in the order of the rows, in the model's own number format, on the CPU.

    Raises:
        DataError: As :func:`evaluate`.
        ConfigError: As :func:`evaluate`.
    """
    kept: list[torch.Tensor] = []
    order: list[int] = []
    device = next(model.parameters()).device
    with torch.inference_mode():
        for rows in evaluation_batches(tokens.lengths_R, batch_rows):
            batch = collate(rows)
            if guard is not None:
                guard.check_batch(batch, lambda rows=rows: rows)
            batch = on_device(batch, device)
            outputs = model(**{name: batch[name] for name in task.inputs if name in batch})
            if guard is not None:
                guard.check_outputs(outputs, len(rows), lambda rows=rows: rows)
            kept.append(_kept(task.keep(outputs, batch), len(rows), kept, task).cpu())
            order.extend(rows)
            after(rows, outputs, batch)
    in_order = torch.cat(kept)
    in_order[torch.tensor(order)] = in_order.clone()
    return in_order


def _kept(kept: torch.Tensor, rows: int, before: Sequence[torch.Tensor], task: Task) -> torch.Tensor:
    """Check that what a task keeps of a batch is as wide as of the others, and return it.

    Raises:
        ConfigError: It is not.
    """
    width = before[0].shape[1] if before else None
    if kept.ndim != 2 or len(kept) != rows or width not in (None, kept.shape[1]):
        allowed = f"({rows}, K), with one K for all batches" if width is None else f"({rows}, {width}), as before"
        hint = "what is kept may not depend on the batch's longest row"
        raise ConfigError("validating", f"{type(task).__name__}.keep gave {tuple(kept.shape)}", allowed, hint)
    return kept


def stopped_early(points: tuple[MetricPoint, ...], train: TrainSettings, direction: Direction) -> bool:
    """Return whether the last ``train.early_stopping`` validations brought nothing better; 0 never stops.

    A value is better if it exceeds the last better one by more than ``train.early_stopping_min_delta``: many small
    steps in one direction count once they add up to more.
    """
    reference, since = math.nan, 0
    margin = -train.early_stopping_min_delta if direction is Direction.MAXIMIZE else train.early_stopping_min_delta
    for point in points:
        since += 1
        if better(point.value + margin, reference, direction):
            reference, since = point.value, 0
    return 0 < train.early_stopping <= since
