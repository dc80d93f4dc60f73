"""Prove the loss of scores that stay sharded: compare the loss over the ranks with that of all scores.

Every rank's part of the vocabulary has targets of its own, its first and last word among them, so that no word can be
taken for another.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.parallel.ranks.collectives import Ranks
from dryfit.parallel.ranks.vocabulary_loss import VocabularyLoss

_IGNORED: Final = -100
_EACH: Final = 7
"""Every seventh token is not learned."""

Score = Callable[[], torch.Tensor]
"""Runs the model once and returns its scores, or a rank's part of them."""


@dataclass(frozen=True, slots=True)
class LossRecord:
    """A loss of all scores.

    Attributes:
        loss: The weighted sum over tokens.
        gradients: By parameter; None where there was none.
        largest: The largest of all gradients.
    """

    loss: float
    gradients: dict[str, torch.Tensor | None]
    largest: float


def loss_of_all(module: nn.Module, plan: ShardPlan, score: Score, seed: int) -> LossRecord:
    """Return torch's loss of the whole model's scores and its gradients; the module is left without gradients."""
    scores = score()
    targets, weights = _targets(scores.shape[:-1].numel(), plan, seed)
    losses = functional.cross_entropy(scores.flatten(0, -2), targets, ignore_index=_IGNORED, reduction="none")
    loss = (losses * weights).sum()
    loss.backward()
    gradients = {name: _copy(one.grad) for name, one in module.named_parameters()}
    module.zero_grad()
    return LossRecord(float(loss.detach()), gradients, largest_of(gradients.values()))


def loss_error(plan: ShardPlan, score: Score, seed: int, ranks: Ranks, record: LossRecord) -> float:
    """Return the error of a rank's loss, relative where the loss is over 1; gradients stay in the parameters.

    Raises:
        ShardError: The scores are not a rank's part.
    """
    scores = score()
    targets, weights = _targets(scores.shape[:-1].numel(), plan, seed)
    token_loss = VocabularyLoss(ranks, plan.vocabulary)
    loss = token_loss(scores.flatten(0, -2), targets, weights, ignored=_IGNORED)
    loss.backward()
    off = abs(float(loss.detach()) - record.loss) / max(1.0, abs(record.loss))
    return off if off == off else float("inf")


def largest_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return the largest absolute value in some gradients."""
    return max((float(one.abs().max()) for one in gradients if one is not None), default=0.0)


def _targets(tokens: int, plan: ShardPlan, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's target and weight."""
    generator = torch.Generator().manual_seed(seed + 2)
    targets = torch.randint(0, plan.vocabulary, (tokens,), generator=generator)
    targets[::_EACH] = _IGNORED
    share = plan.vocabulary // plan.degree
    ends = torch.tensor([end for first in range(0, plan.vocabulary, share) for end in (first, first + share - 1)])
    learned = (targets != _IGNORED).nonzero().flatten()[: len(ends)]
    targets[learned] = ends[: len(learned)]
    return targets, torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()
