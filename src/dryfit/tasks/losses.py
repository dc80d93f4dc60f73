"""The losses of classification: cross entropy and focal loss, weighted by class or not.

Dimension suffixes: ``B`` rows of a batch, ``C`` classes.
"""

from collections.abc import Mapping
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.core.settings import LossSettings
from dryfit.tasks.base import Batch


@final
class ClassificationLoss:
    """Loss of rows of classes.

    Args:
        loss: The ``[loss]`` table.
        num_labels: Classes.
        train_counts: Training rows of each class, for ``class_balance = "weighted"``.
    """

    def __init__(self, loss: LossSettings, *, num_labels: int, train_counts: Mapping[int, int]) -> None:
        self._loss = loss
        self._weights_C = class_weights(train_counts, num_labels) if loss.class_balance == "weighted" else None

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Sum of the rows' class weights, or their number; fp64, the loss rounds it to its own type."""
        labels_B = batch["labels"]
        if self._weights_C is None:
            return torch.tensor(len(labels_B), dtype=torch.float64, device=labels_B.device)
        return self._weights_C.to(labels_B.device)[labels_B].sum()

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Weighted loss of all rows; divided by the weight it is torch's own weighted mean."""
        labels_B = batch["labels"]
        weights_C = None if self._weights_C is None else self._weights_C.to(outputs)
        if self._loss.name == "cross_entropy":
            return F.cross_entropy(
                outputs, labels_B, weight=weights_C, label_smoothing=self._loss.label_smoothing, reduction="sum"
            )
        # Focal loss: (1 - p)^gamma * -log p of the right class (Lin et al. 2017, arXiv:1708.02002, equation 4).
        log_p_B = F.log_softmax(outputs, dim=-1).gather(1, labels_B.unsqueeze(1)).squeeze(1)
        # -expm1 keeps 1 - p exact for p near 1; the clamp keeps the power's gradient finite at p = 1.
        rest_B = (-torch.expm1(log_p_B)).clamp_min(torch.finfo(outputs.dtype).tiny)
        loss_B = -(rest_B**self._loss.gamma) * log_p_B
        return (loss_B if weights_C is None else loss_B * weights_C[labels_B]).sum()


def class_weights(train_counts: Mapping[int, int], num_labels: int) -> torch.Tensor:
    """Inverse frequencies, scaled so that an average training row weighs one.

    scikit-learn's "balanced" heuristic: rows / (classes * rows of the class).
    """
    total = sum(train_counts.values())
    weights = [total / (num_labels * train_counts[label]) for label in range(num_labels)]
    return torch.tensor(weights, dtype=torch.float64)
