"""Cross entropies of tokens, summed: of scores of a whole vocabulary, or computed by somebody who has parts of them.

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
        """The sum, 0-dimensional, in fp32 or better.

        Args:
            scores: (N, V), of all words, or of those that are this process's.
            targets: (N,), words; :data:`~dryfit.tasks.lm.lm_batch.IGNORED` for a token that is not learned.
            weights: (N,), of each token; None: all weigh the same.
        """
        ...


@runtime_checkable
class OverTokens(Protocol):
    """A task that needs scores of words for nothing but such a sum, in its loss and in what it keeps."""

    def with_token_loss(self, token_loss: TokenLoss) -> Task:
        """The same task, with the sum computed so."""
        ...


def over_tokens(task: Task) -> OverTokens | None:
    """A task as one that needs no more than such a sum; None: it needs all scores, for all that is known.

    What a class derived from such a task does with scores, only that class can say, by a method of its own.
    """
    return task if isinstance(task, OverTokens) and "with_token_loss" in vars(type(task)) else None


def whole_token_loss(scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The sum where all scores are here; see :class:`TokenLoss`."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if weights is None:
        return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
    losses_N = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")
    return (losses_N * weights.to(losses_N.dtype)).sum()
