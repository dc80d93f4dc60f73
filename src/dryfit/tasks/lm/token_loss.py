"""Summed cross entropies of tokens, over a whole vocabulary or over shards of it on several ranks.

Dimension suffixes: ``N`` tokens of all sequences, ``V`` words of the vocabulary.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.tasks.base import Task
from dryfit.tasks.lm.lm_batch import IGNORED


class TokenLoss(Protocol):
    """Sums cross entropies of tokens."""

    def __call__(
        self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum, 0-dimensional, in fp32 or better.

        Args:
            scores: (N, V), of all words, or of this rank's.
            targets: (N,), words; :data:`~dryfit.tasks.lm.lm_batch.IGNORED` for a token that is not learned.
            weights: (N,), of each token; None: all weigh the same.
        """
        ...


@runtime_checkable
class OverTokens(Protocol):
    """A task that uses scores of words only for such sums, in its loss and in what it keeps."""

    def with_token_loss(self, token_loss: TokenLoss) -> Task:
        """Return the task with another way to compute the sum."""
        ...

    def with_loss_in_chunks(self) -> Task:
        """Return the task with its loss computed from the scores of some tokens at a time."""
        ...


def over_tokens(task: Task) -> OverTokens | None:
    """Return the task as one that needs such sums only; None: it may need all scores.

    A class derived from such a task may use scores in other ways, and so must define the method itself.
    """
    return task if isinstance(task, OverTokens) and "with_token_loss" in vars(type(task)) else None


def whole_token_loss(scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum from scores of the whole vocabulary; see :class:`TokenLoss`."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if weights is None:
        return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
    losses_N = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")
    return (losses_N * weights.to(losses_N.dtype)).sum()
