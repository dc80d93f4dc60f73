"""Cross entropies of tokens without the scores of all of them: a chunk of tokens at a time, with their gradients.

torch's ``linear_cross_entropy`` is not used: it takes a bare weight (no adapters, nothing between head and scores), a
bf16 input gives it a bf16 loss, tokens have no weights of their own, and torch 2.11 lacks it.

Dimension suffixes: ``N`` tokens, ``C`` tokens of a chunk, ``H`` features, ``V`` words of the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dryfit.tasks.lm.lm_batch import IGNORED

Scores = Callable[[torch.Tensor], torch.Tensor]
"""Gives the scores of some tokens, (C, V), from their features, (C, H)."""

ChunkLosses = Callable[[Scores, torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives each token's loss, (C,), in fp32 or better, from what gives scores, features (C, H) and targets (C,)."""

CHUNK_SCORES: Final = 2**26
"""Scores of a chunk, at most: 256 MiB in fp32, of which a chunk takes about four copies at a time."""

_STEP: Final = 64
"""Chunks have a multiple of so many tokens, as kernels of matrix products like it; and at least so many."""


def chunk_tokens(words: int) -> int:
    """Return how many tokens a chunk has, given the words of the vocabulary."""
    return max(_STEP, CHUNK_SCORES // max(words, 1) // _STEP * _STEP)


@runtime_checkable
class LossesInChunks(Protocol):
    """A model that computes losses in chunks of tokens by a replaceable function."""

    chunk_losses: ChunkLosses


def over_all_words(scores: Scores, features_CH: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Return each token's loss from scores of the whole vocabulary; see :data:`ChunkLosses`."""
    scores_CV = scores(features_CH)
    scores_CV = scores_CV.to(torch.promote_types(scores_CV.dtype, torch.float32))
    return F.cross_entropy(scores_CV, targets_C, ignore_index=IGNORED, reduction="none")


def chunked_losses(
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scores: Scores,
    *,
    chunk: int,
    losses_of: ChunkLosses = over_all_words,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's weighted loss, to be summed, and its loss without a weight or gradient.

    Gradients are computed chunk by chunk along with the losses, so that no score is computed twice; they are those of
    a *sum* of the weighted losses times any number: another use of them has NaN as its gradient. In fp16 they are
    computed in the backward pass, from scores computed once more: only there is the loss scale known that keeps them
    in the format's range.

    Args:
        hidden_NH: (N, H), what scores are computed from.
        targets_N: (N,), words; :data:`~dryfit.tasks.lm.lm_batch.IGNORED` for a token that is not learned.
        weights_N: (N,), of each token; None: all weigh the same.
        scores: Each token's from its own features alone, without random numbers.
        chunk: Tokens at once.
        losses_of: Computes the losses of a chunk; with parts of the vocabulary on several ranks, over these.

    Returns:
        Twice (N,), in fp32 or better, 0 for tokens that are not learned.
    """
    work = _Work(partial(losses_of, scores), targets_N.split(chunk), _around(hidden_NH))
    if not torch.is_grad_enabled():
        losses_N = torch.cat([work.losses(one, part) for part, one in enumerate(hidden_NH.split(chunk))])
        return losses_N if weights_N is None else losses_N * weights_N.to(losses_N.dtype), losses_N
    is_half = torch.float16 in (hidden_NH.dtype, work.autocast_dtype)
    with_hidden = hidden_NH.requires_grad
    losses: list[torch.Tensor] = []
    parameters: list[torch.Tensor] = []
    sums: _Sums | None = None
    for part, rows in enumerate(hidden_NH.detach().split(chunk)):
        leaf = rows.requires_grad_(with_hidden)
        losses_C = work.losses(leaf, part)
        if not part:
            parameters = [one for one in _leaves(losses_C) if one is not leaf]
            sums = None if is_half else _Sums(hidden_NH if with_hidden else None, parameters)
        if sums is not None:
            weights_C = None if weights_N is None else weights_N.split(chunk)[part].to(losses_C.dtype)
            sums.add(losses_C, leaf, parameters, torch.ones_like(losses_C) if weights_C is None else weights_C)
        losses.append(losses_C.detach())
        del losses_C, leaf
    losses_N = torch.cat(losses)
    weighted_N = losses_N if weights_N is None else losses_N * weights_N.to(losses_N.dtype)
    if not with_hidden and not parameters:
        return weighted_N, losses_N
    joined_N = _Joined.apply(weighted_N, weights_N, work, sums, chunk, hidden_NH, *parameters)
    return joined_N, losses_N


@dataclass(frozen=True, slots=True)
class _Work:
    """The computation of one chunk's losses, the same in both passes."""

    losses_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    targets: Sequence[torch.Tensor]
    autocast: tuple[str, torch.dtype] | None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return None if self.autocast is None else self.autocast[1]

    def again(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass, for the backward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], self.autocast[1])

    def losses(self, rows_CH: torch.Tensor, part: int) -> torch.Tensor:
        return self.losses_of(rows_CH, self.targets[part])


class _Sums:
    """Gradients summed over chunks, in fp32 or better, and in the features' own format: each chunk has its own."""

    def __init__(self, hidden_NH: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> None:
        self.hidden_NH = None if hidden_NH is None else torch.empty_like(hidden_NH, requires_grad=False)
        self.of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        self._done = 0

    def add(
        self,
        losses_C: torch.Tensor,
        leaf_CH: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        upstream_C: torch.Tensor,
    ) -> None:
        """Add a chunk's gradients, given those of its losses."""
        inputs = [*([] if self.hidden_NH is None else [leaf_CH]), *parameters]
        found = list(torch.autograd.grad(losses_C, inputs, upstream_C, allow_unused=True)) if inputs else []
        if self.hidden_NH is not None:
            rows_CH = found.pop(0)
            place_CH = self.hidden_NH[self._done : self._done + len(leaf_CH)]
            place_CH.zero_() if rows_CH is None else place_CH.copy_(rows_CH)
        self._done += len(leaf_CH)
        for number, gradient in enumerate(found):
            total = self.of_parameters[number]
            if gradient is None:
                continue
            if total is None:
                self.of_parameters[number] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            else:
                total.add_(gradient)


class _Joined(Function):
    """The losses of all chunks as one differentiable result."""

    @staticmethod
    def forward(
        ctx: Any,
        weighted_N: torch.Tensor,
        weights_N: torch.Tensor | None,
        work: _Work,
        sums: _Sums | None,
        chunk: int,
        hidden_NH: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.work, ctx.sums, ctx.chunk, ctx.with_hidden = work, sums, chunk, hidden_NH.requires_grad
        ctx.weights_N = weights_N
        ctx.save_for_backward(*(() if sums is not None else (hidden_NH, *parameters)))
        return weighted_N.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums: _Sums | None = ctx.sums
        if sums is None:
            hidden_NH, *parameters = ctx.saved_tensors
            weights_N = ctx.weights_N
            upstream_N = gradient_N if weights_N is None else gradient_N * weights_N.to(gradient_N.dtype)
            sums = _recomputed(ctx.work, hidden_NH, ctx.with_hidden, parameters, upstream_N, ctx.chunk)
        else:
            ctx.sums = None
            # Known without waiting for the device: a sum has one gradient for all its terms.
            factor = gradient_N[0].masked_fill((gradient_N != gradient_N[0]).any(), torch.nan)
            for gradient in (sums.hidden_NH, *sums.of_parameters):
                if gradient is not None:
                    gradient.mul_(factor)
        return (None, None, None, None, None, sums.hidden_NH, *sums.of_parameters)


def _recomputed(
    work: _Work,
    hidden_NH: torch.Tensor,
    with_hidden: bool,
    parameters: Sequence[torch.Tensor],
    upstream_N: torch.Tensor,
    chunk: int,
) -> _Sums:
    sums = _Sums(hidden_NH if with_hidden else None, parameters)
    pairs = zip(hidden_NH.detach().split(chunk), upstream_N.split(chunk), strict=True)
    for part, (rows, upstream_C) in enumerate(pairs):
        with torch.enable_grad(), work.again():
            leaf = rows.requires_grad_(with_hidden)
            losses_C = work.losses(leaf, part)
        sums.add(losses_C, leaf, parameters, upstream_C)
        del losses_C, leaf
    return sums


def _around(tensor: torch.Tensor) -> tuple[str, torch.dtype] | None:
    """Return the device type and number format of the autocast that is on for a tensor's device; None: it is off."""
    kind = tensor.device.type
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def _leaves(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves that a result has a gradient for, each once."""
    waiting, seen = [result.grad_fn], set[int]()
    kept: list[Any] = []  # nodes are made anew for each question, and their ids only differ while they live
    while waiting:
        node: Any = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)
