"""The switch for vocabulary scores that stay sharded: it is on during calls of the whole model.

A head that is sharded by words gives each rank the scores of some words, and its plan gathers them. A loss that is
computed over the ranks (:mod:`dryfit.parallel.vocabulary_loss`) does not need the gathered scores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dryfit.parallel.collectives import Ranks
from dryfit.settings.errors import ShardError


@dataclass(slots=True)
class ShardedScores:
    """Switch for the scores of a plan that may stay sharded.

    Attributes:
        stay: Whether they stay sharded; else they are gathered.
    """

    stay: bool = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let them stay sharded in a part of a call that is run by itself."""
        before, self.stay = self.stay, True
        try:
            yield
        finally:
            self.stay = before

    @classmethod
    def in_calls_of(cls, module: nn.Module) -> Self:
        """Return a switch that is on during calls of the module, and off when a part is called, as in generation."""
        made = cls()

        def begin(*_: Any) -> None:
            made.stay = True

        def end(*_: Any) -> None:
            made.stay = False

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        return made


# Cross entropy of vocabulary scores that are sharded over ranks; three numbers a token are sent.
#
# Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
# 2019, section 3. There the largest score, the sum of exponentials and the target's score are three collectives, one
# after another; here each rank makes its sum relative to its own largest score, and one collective gathers all three.
#
# Dimension suffixes: ``N`` tokens, ``V`` words of a rank's shard of the vocabulary, ``H`` features, ``R`` ranks,
# ``K`` numbers a token that each rank sends.


NUMBERS: Final = 3
"""Numbers a token that each rank sends: its largest score, its sum of exponentials, its score of the target."""

_WHAT: Final = "numbers of each token's loss"


def vocabulary_range(vocabulary: int, rank: int, degree: int) -> tuple[int, int]:
    """Return the range of words whose scores a rank has: first, and one behind the last."""
    share = vocabulary // degree
    return rank * share, (rank + 1) * share


@dataclass(frozen=True, slots=True)
class VocabularyLoss:
    """Sums cross entropies of tokens over ranks; the same number on each of them, bit for bit.

    Attributes:
        ranks: This rank's end of the collectives.
        vocabulary: Words of the whole vocabulary.
    """

    ranks: Ranks
    vocabulary: int

    def __call__(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        ignored: int = -100,
    ) -> torch.Tensor:
        """Return the sum of the tokens' losses; 0-dimensional, in fp32 or better.

        Args:
            scores: (N, V), of this rank's words; in any floating-point format.
            targets: (N,), words of the whole vocabulary.
            weights: (N,), of each token; None: all weigh the same.
            ignored: Target of a token that is not learned.

        Raises:
            ShardError: The scores are not those of this rank's words.
        """
        losses_N = self.of_tokens(scores, targets, ignored=ignored)
        return (losses_N if weights is None else losses_N * weights.to(losses_N.dtype)).sum()

    def of_tokens(self, scores: torch.Tensor, targets: torch.Tensor, *, ignored: int = -100) -> torch.Tensor:
        """Return each token's loss, (N,), 0 where its target is ignored; see :meth:`__call__`."""
        begin, end = vocabulary_range(self.vocabulary, self.ranks.rank, self.ranks.degree)
        if scores.shape[-1] != end - begin:
            raise ShardError(
                f"computing a loss on rank {self.ranks.rank} of {self.ranks.degree}",
                f"scores of {scores.shape[-1]} words",
                allowed=f"{end - begin}, a rank's part of the {self.vocabulary} words",
                hint="scores that were put together have a loss without the other ranks",
            )
        return _CrossEntropy.apply(scores, targets, begin, ignored, self.ranks)

    def of_chunk(
        self,
        switch: ShardedScores,
        scores: Callable[[torch.Tensor], torch.Tensor],
        features: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Return each token's loss, (N,), from what gives scores of tokens; a chunk is also computed in backward.

        Args:
            switch: Keeps the scores sharded.
            scores: Gives those of this rank's words, (N, V), from features.
            features: (N, H).
            targets: As in :meth:`__call__`.
        """
        with switch.kept():
            scores_NV = scores(features)
        return self.of_tokens(scores_NV, targets)


class _CrossEntropy(Function):
    """Keeps only the scores, which live until the backward pass anyway, and nothing else as large."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, targets: torch.Tensor, begin: int, ignored: int, ranks: Ranks
    ) -> torch.Tensor:
        dtype = torch.promote_types(scores.dtype, torch.float32)
        here_N = (targets >= begin) & (targets < begin + scores.shape[1]) & (targets != ignored)
        place_N1 = (targets - begin).masked_fill(~here_N, 0).unsqueeze(1)
        largest_N = scores.detach().amax(dim=1).to(dtype)
        # Where all of a rank's scores are -inf: whole parts of a vocabulary may be ruled out.
        own_N = largest_N.masked_fill(largest_N == -torch.inf, 0)
        sum_N = (scores - own_N.unsqueeze(1)).exp_().sum(dim=1)
        # A target outside the vocabulary ends as an infinite loss.
        target_N = scores.gather(1, place_N1).squeeze(1).to(dtype).masked_fill(~here_N, -torch.inf)
        sent_RKN = torch.stack(ranks.all_gather(torch.stack([largest_N, sum_N, target_N]), _WHAT))
        most_N = sent_RKN[:, 0].amax(dim=0)
        total_N = (sent_RKN[:, 1] * (sent_RKN[:, 0] - most_N).exp()).sum(dim=0)
        out_N = targets == ignored
        ctx.save_for_backward(scores, most_N, total_N, place_N1, here_N, out_N)
        return (total_N.log() - (sent_RKN[:, 2].amax(dim=0) - most_N)).masked_fill(out_N, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        scores, most_N, total_N, place_N1, here_N, out_N = ctx.saved_tensors
        gradient_N = gradient_N.masked_fill(out_N, 0)
        made_NV = (scores - most_N.unsqueeze(1)).exp_().mul_((gradient_N / total_N).unsqueeze(1))
        # Not added in place: that has no deterministic kernel on CUDA.
        made_NV.scatter_(1, place_N1, made_NV.gather(1, place_N1) - (gradient_N * here_N).unsqueeze(1))
        return made_NV.to(scores.dtype), None, None, None, None
