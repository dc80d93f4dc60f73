"""The loss of a class and a span: two parts, each with a normaliser of its own.

Dimension suffixes: ``B`` windows of a batch, ``2`` the two parts: class, span.
"""

from typing import Final, final

import torch

from dryfit.core.settings.choices import Weighting
from dryfit.core.settings.tables import LossSettings, MultitaskSettings
from dryfit.tasks.base import Batch, Outputs
from dryfit.tasks.losses import ScoreLoss
from dryfit.tasks.spans.span_losses import SpanLoss
from dryfit.tasks.tokens.token_set import CLASSES

TRAINS_CLASS: Final = "trains_class"
TRAINS_SPAN: Final = "trains_span"
"""Entries of a batch: 1 for windows that train this part, else 0. Without them every window trains both."""


@final
class TwoLosses:
    """Weighted sum of a class's and a span's mean loss over the windows that train each.

    ``fixed``: ``w * class + (1 - w) * span``. ``uncertainty``: ``exp(-s) * loss + s / 2`` for each of the two, with a
    learned log variance ``s`` of its own (Kendall et al. 2018, arXiv:1705.07115, equation 10: both losses are those of
    a softmax, so that neither has the factor one half of a regression).

    Args:
        settings: The ``[multitask]`` table.
        classes: The loss of classes.
        loss: The ``[loss]`` table; its ``alpha`` applies to classes only.
    """

    def __init__(self, settings: MultitaskSettings, classes: ScoreLoss, loss: LossSettings) -> None:
        self._settings = settings
        self._classes = classes
        self._spans = SpanLoss(loss.model_copy(update={"alpha": None}))

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the normalisers of both parts, (2,), fp64; 1 where no window of the batch trains a part."""
        weights_2 = self._weights(batch)
        return torch.where(weights_2 > 0, weights_2, 1)

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return both parts, summed over the windows that train each, (2,)."""
        assert isinstance(outputs, tuple)
        classes_BC, spans_BL2 = outputs[:2]
        rows_B = self._classes.row_losses(classes_BC, {"labels": batch[CLASSES]})
        windows_B = self._spans.row_losses(spans_BL2, batch)
        if TRAINS_CLASS in batch:
            rows_B, windows_B = rows_B * batch[TRAINS_CLASS], windows_B * batch[TRAINS_SPAN]
        if self._settings.weighting is Weighting.FIXED:
            weight = self._settings.criteria_weight
            return torch.stack([rows_B.sum() * weight, windows_B.sum() * (1 - weight)])
        parts_2 = torch.stack([rows_B.sum(), windows_B.sum()])
        logs_2 = outputs[2][0]
        # s / 2 counts once for a batch: its micro-batches share it by their weights.
        return parts_2 * torch.exp(-logs_2) + self._weights(batch).to(parts_2) * logs_2 / 2

    def _weights(self, batch: Batch) -> torch.Tensor:
        rows_B = self._classes.row_weights({"labels": batch[CLASSES]})
        windows_B = torch.ones_like(rows_B)
        if TRAINS_CLASS in batch:
            rows_B, windows_B = rows_B * batch[TRAINS_CLASS], windows_B * batch[TRAINS_SPAN]
        return torch.stack([rows_B.sum(), windows_B.sum()])
