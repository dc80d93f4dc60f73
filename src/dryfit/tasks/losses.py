"""Losses of a row's scores: cross entropy and focal loss, for one class of several or each by itself; squared error.

Each is a sum with a normaliser: their quotient is the weighted mean over a batch. docs/settings.md has the formulas.

Dimension suffixes: ``B`` rows of a batch, ``C`` classes; ``N`` the two cases of a class: absent, present.
"""

from collections.abc import Mapping
from typing import TypeAlias, final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import LossSettings
from dryfit.tasks.base import Batch


@final
class ClassificationLoss:
    """Loss of rows that have one of several classes each.

    Args:
        loss: The ``[loss]`` table.
        num_labels: Classes.
        train_counts: Training rows of each class, for ``class_balance``.

    Raises:
        ConfigError: ``alpha`` is set, which weighs two classes, and there are more.
    """

    def __init__(self, loss: LossSettings, *, num_labels: int, train_counts: Mapping[int, int]) -> None:
        if loss.alpha is not None and num_labels != 2:
            raise ConfigError(
                f"checking loss.alpha = {loss.alpha}",
                f"data.num_labels is {num_labels}",
                allowed="alpha with two classes, or with data.multi_label = true",
                hint='balance more classes with loss.class_balance = "weighted" or "effective"',
            )
        self._loss = loss
        self._weights_C = class_weights(_per_class(train_counts, num_labels), loss)

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the rows' class weights, or the number of rows; fp64."""
        labels_B = batch["labels"]
        if self._weights_C is None:
            return torch.full((), len(labels_B), dtype=torch.float64, device=labels_B.device)
        return self.row_weights(batch).sum()

    def row_weights(self, batch: Batch) -> torch.Tensor:
        """Return the class weight of each row; 1 without class weights."""
        labels_B = batch["labels"]
        if self._weights_C is None:
            return torch.ones(len(labels_B), dtype=torch.float64, device=labels_B.device)
        return self._weights_C.to(labels_B.device, non_blocking=True)[labels_B]

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the weighted loss of all rows; divided by the normaliser it is torch's weighted mean."""
        return self.row_losses(outputs, batch).sum()

    def row_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the weighted loss of each row."""
        labels_B = batch["labels"]
        weights_C = None if self._weights_C is None else self._weights_C.to(outputs, non_blocking=True)
        if self._loss.name == "cross_entropy":
            return F.cross_entropy(
                outputs, labels_B, weight=weights_C, label_smoothing=self._loss.label_smoothing, reduction="none"
            )
        log_p_B = F.log_softmax(outputs, dim=-1).gather(1, labels_B.unsqueeze(1)).squeeze(1)
        loss_B = focal(log_p_B, labels_B, self._loss)
        return loss_B if weights_C is None else loss_B * weights_C[labels_B]


@final
class MultiLabelLoss:
    """Loss of rows that have any number of classes: a binary loss for each class.

    Args:
        loss: The ``[loss]`` table.
        num_labels: Classes.
        train_counts: Training rows that have each class, for ``class_balance``.
        train_rows: All training rows.
    """

    def __init__(
        self, loss: LossSettings, *, num_labels: int, train_counts: Mapping[int, int], train_rows: int
    ) -> None:
        self._loss = loss
        present_C = _per_class(train_counts, num_labels)
        self._weights_CN = class_weights(torch.stack([train_rows - present_C, present_C], dim=1), loss)

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the weights of all (row, class) pairs, or their number; fp64."""
        labels_BC = batch["labels"]
        if self._weights_CN is None:
            return torch.full((), labels_BC.numel(), dtype=torch.float64, device=labels_BC.device)
        return self.row_weights(batch).sum()

    def row_weights(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the weights of each row's classes, or their number."""
        labels_BC = batch["labels"]
        if self._weights_CN is None:
            return torch.full(labels_BC.shape[:1], labels_BC.shape[1], dtype=torch.float64, device=labels_BC.device)
        return _of_side(self._weights_CN.to(labels_BC.device, non_blocking=True), labels_BC).sum(dim=1)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the weighted loss of all (row, class) pairs; divided by the normaliser it is their mean."""
        return self.row_losses(outputs, batch).sum()

    def row_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the weighted loss of each row, summed over its classes."""
        labels_BC = batch["labels"]
        targets_BC = labels_BC.to(outputs)
        smoothing = self._loss.label_smoothing
        if smoothing > 0:
            targets_BC = targets_BC * (1 - smoothing) + smoothing / 2
        loss_BC = F.binary_cross_entropy_with_logits(outputs, targets_BC, reduction="none")
        if self._loss.name == "focal":
            loss_BC = focal(-loss_BC, labels_BC, self._loss)
        if self._weights_CN is not None:
            loss_BC = loss_BC * _of_side(self._weights_CN.to(outputs, non_blocking=True), labels_BC)
        return loss_BC.sum(dim=1)


@final
class SquaredLoss:
    """Squared error of rows whose label is a number: the mean over a batch is torch's ``MSELoss``."""

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of rows; fp64."""
        return torch.full((), len(batch["labels"]), dtype=torch.float64, device=batch["labels"].device)

    def row_weights(self, batch: Batch) -> torch.Tensor:
        """Return 1 for each row."""
        return torch.ones(len(batch["labels"]), dtype=torch.float64, device=batch["labels"].device)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the squared error of all rows."""
        return self.row_losses(outputs, batch).sum()

    def row_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the squared error of each row."""
        return F.mse_loss(outputs.squeeze(-1), batch["labels"].to(outputs), reduction="none")


ScoreLoss: TypeAlias = ClassificationLoss | MultiLabelLoss | SquaredLoss
"""A loss of (B, C) scores. ``row_losses`` are each row's part of its sum, ``row_weights`` of its normaliser; (B,)."""


def make_loss(
    loss: LossSettings, *, num_labels: int, train_counts: Mapping[int, int], train_rows: int, multi_label: bool
) -> ScoreLoss:
    """Return the loss for the ``[loss]`` table and the kind of labels.

    Raises:
        ConfigError: ``alpha`` is set and there are more than two classes, of which a row has one.
    """
    if multi_label:
        return MultiLabelLoss(loss, num_labels=num_labels, train_counts=train_counts, train_rows=train_rows)
    return ClassificationLoss(loss, num_labels=num_labels, train_counts=train_counts)


def class_weights(counts: torch.Tensor, loss: LossSettings) -> torch.Tensor | None:
    """Return class weights by which an average training row weighs one; None for ``class_balance = "none"``.

    ``weighted``: inverse frequencies, scikit-learn's "balanced" heuristic. ``effective``: inverse effective numbers,
    ``(1 - beta) / (1 - beta**n)`` (Cui et al. 2019, arXiv:1901.05555, equation 2). A class without rows weighs nothing.

    Args:
        counts: Training rows of each class along the last dimension, fp64.
        loss: The ``[loss]`` table.
    """
    match loss.class_balance:
        case "none":
            return None
        case "weighted":
            weights = 1 / counts
        case "effective":
            beta = torch.tensor(loss.effective_beta, dtype=counts.dtype)
            weights = (1 - beta) / -torch.expm1(counts * beta.log())
    weights = torch.where(counts > 0, weights, 0)
    return weights * counts.sum(dim=-1, keepdim=True) / (weights * counts).sum(dim=-1, keepdim=True)


def focal(log_p: torch.Tensor, labels: torch.Tensor, loss: LossSettings) -> torch.Tensor:
    """Return ``alpha * (1 - p)**gamma * -log p`` for the true label (Lin et al. 2017, arXiv:1708.02002, equation 5).

    Args:
        log_p: Log probability of the true label.
        labels: 1 for class 1, or for a class that is present: these weigh ``alpha``, others ``1 - alpha``.
        loss: The ``[loss]`` table.
    """
    # -expm1 keeps 1 - p exact for p near 1; the clamp keeps the power's gradient finite at p = 1.
    rest = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny)
    losses = -(rest**loss.gamma) * log_p
    if loss.alpha is None:
        return losses
    return losses * (labels.to(log_p.dtype) * (2 * loss.alpha - 1) + (1 - loss.alpha))


def _of_side(weights_CN: torch.Tensor, labels_BC: torch.Tensor) -> torch.Tensor:
    """Return the weight of each (row, class) pair: that of rows with the class, or of rows without."""
    return torch.where(labels_BC > 0, weights_CN[:, 1], weights_CN[:, 0])


def _per_class(train_counts: Mapping[int, int], num_labels: int) -> torch.Tensor:
    return torch.tensor([train_counts[label] for label in range(num_labels)], dtype=torch.float64)
