"""The task ``criteria``: (criterion, text), or text alone, to one of several classes or to any number of them.

Dimension suffixes: ``B`` rows of a batch, ``R`` rows of a split, ``C`` classes.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch

from dryfit.core.settings import LossSettings
from dryfit.tasks.base import Batch, pad_rows
from dryfit.tasks.losses import make_loss
from dryfit.tasks.metrics import multi_label_metrics, one_class_metrics
from dryfit.tasks.tokens import TokenSet


@final
class CriteriaTask:
    """Classification by cross entropy or focal loss.

    Args:
        loss: The ``[loss]`` table.
        num_labels: Classes.
        train_counts: Training rows of each class, for ``class_balance``.
        pad_id: Token that pads rows.
        train_rows: All training rows; read with ``multi_label``, where the counts do not add up to them.
        multi_label: A row may have any number of the classes.

    Raises:
        ConfigError: ``loss.alpha`` is set and there are more than two classes, of which a row has one.
    """

    def __init__(
        self,
        loss: LossSettings,
        *,
        num_labels: int,
        train_counts: Mapping[int, int],
        pad_id: int,
        train_rows: int = 0,
        multi_label: bool = False,
    ) -> None:
        self._loss = make_loss(
            loss, num_labels=num_labels, train_counts=train_counts, train_rows=train_rows, multi_label=multi_label
        )
        self._multi_label = multi_label
        self._pad_id = pad_id

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some rows and add their labels."""
        return pad_rows(tokens, rows, pad_id=self._pad_id) | {"labels": tokens.labels_R[list(rows)].long()}

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """What the loss sum of this batch is divided by."""
        return self._loss.batch_weight(batch)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Weighted loss of all rows."""
        return self._loss.loss_sum(outputs, batch)

    def metrics(self, outputs: torch.Tensor, tokens: TokenSet) -> dict[str, float]:
        """All metrics of a split that its classes have."""
        compute = multi_label_metrics if self._multi_label else one_class_metrics
        return compute(outputs, tokens.labels_R)
