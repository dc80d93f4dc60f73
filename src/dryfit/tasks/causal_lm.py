"""The task ``causal-lm``: each token from those before it. Its training step, for planning.

Dimension suffixes: ``B`` rows, ``L`` tokens, ``V`` words of the vocabulary.
"""

from typing import final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import nn

from dryfit.tasks.base import Batch

IGNORED = -100
"""Label of a token that is not learned: padding, or a prompt."""


@final
class CausalLm(nn.Module):
    """Scores of the next token; no cache of keys and values is kept.

    Args:
        decoder: A causal language model, with or without adapters.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary after each token.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.

        Returns:
            (B, L, V).
        """
        return self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


@final
class CausalLmLoss:
    """Cross entropy of each token, given those before it."""

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Tokens that are learned: all but each row's first."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed over tokens, in fp32. Labels are shifted and not the scores: a shifted view would be copied."""
        next_BL = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        scores = outputs.float().flatten(0, 1)
        return F.cross_entropy(scores, next_BL.flatten(), ignore_index=IGNORED, reduction="sum")
