"""The loss of spans: the start and the end are each classified among the tokens that they may be.

Dimension suffixes: ``B`` windows of a batch, ``L`` tokens, ``2`` start and end.
"""

import math
from typing import final

import torch

from dryfit.core.settings.tables import LossSettings
from dryfit.tasks.base import Batch
from dryfit.tasks.losses import focal
from dryfit.tasks.spans.span_decoding import answerable


@final
class SpanLoss:
    """Mean of the losses of a window's start and end; both are the null token in a window without a gold span.

    The softmax is over the text's tokens and the null token alone: padding, criterion and separators get no
    probability, also by label smoothing.

    Args:
        loss: The ``[loss]`` table.
    """

    def __init__(self, loss: LossSettings) -> None:
        self._loss = loss

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of windows, fp64."""
        labels_B2 = batch["labels"]
        return torch.full((), len(labels_B2), dtype=torch.float64, device=labels_B2.device)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss summed over windows; see :meth:`row_losses`."""
        return self.row_losses(outputs, batch).sum()

    def row_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss of each window, (B,).

        Args:
            outputs: Scores of each token as a start and as an end, (B, L, 2).
            batch: ``labels`` (B, 2), ``text_mask`` (B, L) and ``nulls`` (B).
        """
        valid_BL1 = answerable(batch).unsqueeze(-1)
        log_p_BL2 = outputs.masked_fill(~valid_BL1, -math.inf).log_softmax(dim=1)
        true_B2 = log_p_BL2.gather(1, batch["labels"].unsqueeze(1)).squeeze(1)
        if self._loss.name == "focal":
            return focal(true_B2, batch["labels"], self._loss).sum(dim=1) / 2
        smoothing = self._loss.label_smoothing
        if smoothing == 0:
            return -true_B2.sum(dim=1) / 2
        # Masked before the sum: 0 * -inf is NaN.
        mean_B2 = log_p_BL2.masked_fill(~valid_BL1, 0).sum(dim=1) / valid_BL1.sum(dim=1)
        return -((1 - smoothing) * true_B2 + smoothing * mean_B2).sum(dim=1) / 2
