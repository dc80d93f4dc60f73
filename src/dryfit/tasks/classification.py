"""The task ``criteria``: (criterion, text), or text alone, to one of several classes.

Dimension suffixes: ``B`` rows of a batch, ``R`` rows of a split, ``C`` classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from sklearn.metrics import accuracy_score, matthews_corrcoef, precision_recall_fscore_support

from dryfit.core.errors import ConfigError
from dryfit.core.settings import LossSettings, Metric
from dryfit.tasks.base import Batch, pad_rows
from dryfit.tasks.losses import ClassificationLoss
from dryfit.tasks.tokens import TokenSet


@final
class CriteriaTask:
    """Classification by cross entropy or focal loss.

    Args:
        loss: The ``[loss]`` table.
        num_labels: Classes.
        train_counts: Training rows of each class, for ``class_balance = "weighted"``.
        pad_id: Token that pads rows.
    """

    def __init__(self, loss: LossSettings, *, num_labels: int, train_counts: Mapping[int, int], pad_id: int) -> None:
        self._loss = ClassificationLoss(loss, num_labels=num_labels, train_counts=train_counts)
        self._num_labels = num_labels
        self._pad_id = pad_id

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some rows and add their labels."""
        return pad_rows(tokens, rows, pad_id=self._pad_id) | {"labels": tokens.labels_R[list(rows)]}

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Sum of the rows' class weights, or their number."""
        return self._loss.batch_weight(batch)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Weighted loss of all rows."""
        return self._loss.loss_sum(outputs, batch)

    def metrics(self, outputs: torch.Tensor, tokens: TokenSet) -> dict[str, float]:
        """All metrics of a split.

        ``loss`` is the plain cross entropy whatever the training loss, so that trials can be compared by it.
        """
        truth_R = tokens.labels_R.numpy()
        guess_R = outputs.argmax(dim=-1).numpy()
        # One call for all that counts by class: scikit-learn's input checks cost more than its sums.
        nothing: Any = 0  # the score where a class has no row; the stubs only know the default, a warning
        counted: Any = precision_recall_fscore_support(
            truth_R, guess_R, labels=np.arange(self._num_labels), average=None, zero_division=nothing
        )
        _, recall_C, f1_C, support_C = counted
        found = {
            Metric.F1_MACRO: f1_C.mean(),
            Metric.ACCURACY: accuracy_score(truth_R, guess_R),
            Metric.BALANCED_ACCURACY: recall_C[support_C > 0].mean(),
            Metric.MCC: matthews_corrcoef(truth_R, guess_R),
            Metric.LOSS: F.cross_entropy(outputs, tokens.labels_R).item(),
        }
        if self._num_labels == 2:
            found[Metric.F1] = f1_C[1]
        return {str(name): float(value) for name, value in found.items()}


def check_metric(metric: Metric, num_labels: int) -> None:
    """Refuse a metric that these classes do not have.

    Raises:
        ConfigError: ``f1`` is of the positive one of two classes.
    """
    if metric is Metric.F1 and num_labels > 2:
        raise ConfigError(
            "checking study.metric",
            f"f1 with {num_labels} classes",
            allowed="f1 for two classes: it is that of class 1",
            hint="use f1_macro",
        )
