"""Two heads on the same token vectors: one for the row's class, one for the start and end of its evidence.

Dimension suffixes: ``B`` windows, ``L`` tokens, ``D`` width of token vectors, ``C`` classes, ``2`` two parts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.core.settings.choices import Weighting
from dryfit.tasks.heads import EncoderModel, HeadSpec, dtype_of, make_head, pooled, width_of, without_autocast


@final
class TwoHeads(nn.Module):
    """A head for classes and a head for spans; with uncertainty weighting also the variances that weight their losses.

    Args:
        width: Of the token vectors.
        spec: The shape of the head for classes; the one for spans has the same hidden layers.
        weighting: How the two losses are weighted.
    """

    def __init__(self, width: int, spec: HeadSpec, weighting: Weighting) -> None:
        super().__init__()
        self.spec = spec
        self.classes = make_head(width, spec)
        self.spans = make_head(width, replace(spec, num_outputs=2, per_token=True))
        # Log variances: any number is legal, and at 0 both losses count as they are.
        self.log_variances = nn.Parameter(torch.zeros(2)) if weighting is Weighting.UNCERTAINTY else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return dtype_of(self.spans)

    def forward(self, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Score windows.

        Args:
            hidden_BLD: Their token vectors, in the head's dtype.
            mask_BL: 1 for tokens, 0 for padding.

        Returns:
            Scores of classes (B, C), scores of each token as a start and as an end (B, L, 2), and where they are
            learned the log variances, the same for each window (B, 2).
        """
        classes_BC = self.classes(pooled(hidden_BLD, mask_BL, self.spec))
        outputs = (classes_BC, self.spans(hidden_BLD))
        if self.log_variances is None:
            return outputs
        return (*outputs, self.log_variances.expand(len(mask_BL), 2))


@final
class SharedEncoder(EncoderModel):
    """One encoder with two heads, which run in fp32 whatever the encoder's precision.

    Args:
        encoder: The encoder.
        spec: The shape of the head for classes.
        weighting: How the losses of the two heads are weighted.
        limits: As in :class:`~dryfit.tasks.base.TaskModel`.
    """

    def __init__(
        self, encoder: PreTrainedModel, spec: HeadSpec, weighting: Weighting, limits: Mapping[str, int]
    ) -> None:
        super().__init__(encoder)
        self.limits = limits
        self.head = TwoHeads(width_of(encoder), spec, weighting)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Score windows; see :meth:`TwoHeads.forward`.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            token_type_ids: (B, L); left out for encoders without segments.
        """
        hidden_BLD = self.token_vectors(input_ids, attention_mask, token_type_ids)
        with without_autocast(hidden_BLD.device):
            return self.head(hidden_BLD.to(self.head.dtype), attention_mask)
