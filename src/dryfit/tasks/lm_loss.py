"""Batches of a causal language model, and cross entropies of tokens without all scores at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from dryfit.tasks.base import Batch, Task, pad_rows, padded
from dryfit.tasks.prompts import ROLES, TokenRole
from dryfit.tasks.tokens import TokenSet

# Batches of a causal language model: sequences of one or several examples, with labels.
#
# Dimension suffixes: ``B`` sequences, ``L`` tokens, ``T`` the tokens of one of them.


IGNORED: Final = -100
"""Label of a token that is not learned: padding, a prompt, or the first of an example."""

INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
PADDED: Final = (*INPUTS, "labels", "answers", "weights")


def entries(*, learn_prompt: bool, packing: bool, mix: bool) -> tuple[str, ...]:
    """Return the names of a batch's entries, each (B, L)."""
    wanted = {"position_ids": packing, "answers": learn_prompt, "weights": mix}
    return tuple(name for name in PADDED if wanted.get(name, True))


def labelled(
    tokens: TokenSet, rows: Sequence[int], *, pad_id: int, learn_prompt: bool, packing: bool, mix: float | None
) -> Batch:
    """Return the batch of some sequences, padded on the right to the longest of them.

    Args:
        tokens: See :func:`dryfit.tasks.prompts.sequences`.
        rows: Which sequences.
        pad_id: Token that pads them.
        learn_prompt: Learn prompts too; ``answers`` then has the labels without them.
        packing: Add positions, which start at 0 in each example and in the padding.
        mix: Weight of a token of a criteria answer, ``1 - mix`` for any other; None: all weigh the same.

    Returns:
        As :func:`entries`: ids, masks, positions and labels in int64, weights in fp64.
    """
    batch = pad_rows(tokens, rows, pad_id=pad_id)
    size = batch["input_ids"].shape
    roles_BL = padded(tokens.extra[ROLES], tokens, rows)
    # An example's first token has none before it: what would predict it is the end of another example.
    follows_BL = (roles_BL & TokenRole.FIRST == 0) & (batch["attention_mask"] == 1)
    ignored = torch.full(size, IGNORED)
    answers_BL = torch.where(follows_BL & (roles_BL & TokenRole.ANSWER != 0), batch["input_ids"], ignored)
    batch["labels"] = torch.where(follows_BL, batch["input_ids"], ignored) if learn_prompt else answers_BL
    if learn_prompt:
        batch["answers"] = answers_BL
    if mix is not None:
        asks_BL = (roles_BL & TokenRole.CRITERIA != 0) & (batch["attention_mask"] == 1)
        batch["weights"] = torch.where(asks_BL, mix, 1 - mix).to(torch.float64)
    if packing:
        batch["position_ids"] = _positions(roles_BL, batch["attention_mask"])
    return batch


def _positions(roles_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its example; the padding counts from 0 as an example of its own."""
    places_L = torch.arange(roles_BL.shape[1])
    begins_BL = roles_BL & TokenRole.FIRST != 0
    padding_begins = mask_BL.sum(dim=1, keepdim=True)
    begins_BL = begins_BL | (places_L == padding_begins)
    return places_L - torch.where(begins_BL, places_L, 0).cummax(dim=1).values


# Summed cross entropies of tokens, over a whole vocabulary or over shards of it on several ranks.
#
# Dimension suffixes: ``N`` tokens of all sequences, ``V`` words of the vocabulary.


class TokenLoss(Protocol):
    """Sums cross entropies of tokens."""

    def __call__(
        self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum, 0-dimensional, in fp32 or better.

        Args:
            scores: (N, V), of all words, or of this rank's.
            targets: (N,), words; :data:`~dryfit.tasks.lm_loss.IGNORED` for a token that is not learned.
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


# The computation of a causal language model after its decoder stack, by its own code: head, softcap, scale.
#
# The model's forward pass is run with its stack replaced by one that gives known features. So nothing is known here
# of any architecture: whatever lies between the stack and the scores is computed as the model does it.
#
# Dimension suffixes: ``B`` sequences, ``L`` tokens, ``C`` tokens of a chunk, ``H`` features, ``V`` words.


FOREIGN: Final = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
)
"""What a model's own code may raise where it asks for more than its stack's features."""

_TRIED: Final = 5
"""Tokens that a model is tried with."""

_CLOSE: Final = 2e-2
"""Share of the largest score that another shape may change by rounding in half precision."""


class _Features(BaseModelOutputWithPast):
    """A stack's output that has features, and None for all that some models give beside them."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def hidden_states(decoder: nn.Module, model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Return the features that a model computes its scores from, (B, L, H); what follows sees no token.

    Args:
        decoder: The model, or PEFT's around it.
        model: The model itself.
        **inputs: Of its forward pass.
    """
    stack = model.base_model
    own: Callable[..., Any] = stack.forward
    found: list[torch.Tensor] = []

    def forward(*args: Any, **kwargs: Any) -> _Features:
        features_BLH: torch.Tensor = own(*args, **kwargs)[0]
        found.append(features_BLH)
        return _Features(last_hidden_state=features_BLH[:, :0])  # pyright: ignore[reportArgumentType]

    with _forward(stack, forward):
        decoder(**inputs, use_cache=False)
    return _once(found, model)


def scores_of(decoder: nn.Module, model: PreTrainedModel, hidden_CH: torch.Tensor) -> torch.Tensor:
    """Return the scores that a model computes from features, (C, V).

    Args:
        decoder: As in :func:`hidden_states`.
        model: As in :func:`hidden_states`.
        hidden_CH: (C, H).
    """
    stack = model.base_model
    given: list[torch.Tensor] = []

    def forward(*_args: Any, **_kwargs: Any) -> _Features:
        given.append(hidden_CH.unsqueeze(0))
        return _Features(last_hidden_state=given[-1])  # pyright: ignore[reportArgumentType]

    with _forward(stack, forward):
        scores_BCV: torch.Tensor = decoder(use_cache=False).logits
    _once(given, model)
    return scores_BCV.squeeze(0)


def cannot_chunk(decoder: nn.Module, model: PreTrainedModel) -> str | None:
    """Why a model's scores cannot be computed for some tokens alone, from its stack's features; None where they can.

    Nothing is computed from the model's weights but shapes, so that planning and training answer alike; whether the
    scores are the model's own, :func:`scores_differ` tries on its weights.

    Args:
        decoder: As in :func:`hidden_states`.
        model: As in :func:`hidden_states`.
    """
    name = model.config.model_type
    stack = model.base_model
    if stack is model:
        return f"{name} has no part that is called its base model"
    if any(isinstance(one, nn.Dropout) and one.p for one in _outside(model)):
        return f"the head of {name} has dropout"
    features_CH = _features(model)
    try:
        with torch.no_grad():
            scores_CV = scores_of(decoder, model, features_CH)
    except FOREIGN as error:
        return f"what {name} computes after its layers needs more than their output ({type(error).__name__})"
    if scores_CV.ndim != 2 or len(scores_CV) != len(features_CH):
        return f"{name} gives scores {tuple(scores_CV.shape)} for {len(features_CH)} tokens"
    return None


def head_alone(model: PreTrainedModel) -> bool:
    """Whether a model has no parameters outside its stack but those of its head, which has no adapter."""
    own = {id(one) for one in model.base_model.parameters()}
    head = model.get_output_embeddings()
    if head is not None:
        own |= {id(one) for one in head.parameters(recurse=False)}
    return all(id(one) in own for part in _outside(model) for one in part.parameters(recurse=False))


def scores_differ(decoder: nn.Module, model: PreTrainedModel) -> str | None:
    """Why a model's scores of some tokens alone are not those among others; None where they are, up to rounding.

    The test is made with the model's own weights, in training. Its layers are not run.

    Args:
        decoder: As in :func:`hidden_states`, with its weights.
        model: As in :func:`hidden_states`.
    """
    name = model.config.model_type
    features_CH = _features(model)
    draw = torch.Generator().manual_seed(0)
    features_CH.copy_(torch.randn(features_CH.shape, generator=draw))
    was_training = decoder.training
    decoder.train()
    with torch.no_grad():
        whole_CV, again_CV = (scores_of(decoder, model, features_CH).float() for _ in range(2))
        parts_CV = torch.cat([scores_of(decoder, model, rows).float() for rows in features_CH.split(3)])
    decoder.train(was_training)
    if not torch.equal(whole_CV, again_CV):
        return f"the scores of {name} are random"
    size, moved = float(whole_CV.abs().max()), float((whole_CV - parts_CV).abs().max())
    if not moved <= _CLOSE * size:
        return f"the scores of {name} depend on those beside them: they change by {moved:.2g} of {size:.2g}"
    return None


def _outside(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model that are not in its stack."""
    inside = set(model.base_model.modules())
    return [one for one in model.modules() if one not in inside]


def _features(model: PreTrainedModel) -> torch.Tensor:
    """Return room for some tokens' features, as the head takes them."""
    head = model.get_output_embeddings()
    weight = next((one for one in (head or model).parameters() if one.is_floating_point()), None)
    assert weight is not None
    size = _TRIED, model.config.get_text_config().hidden_size
    return torch.empty(size, dtype=weight.dtype, device=weight.device)


def _once(calls: list[torch.Tensor], model: PreTrainedModel) -> torch.Tensor:
    if len(calls) != 1:
        raise TypeError(f"{type(model).__name__} calls its base model {len(calls)} times")
    return calls[0]


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before: Any = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


# Cross entropies of tokens without the scores of all of them: a chunk of tokens at a time, with their gradients.
#
# torch's ``linear_cross_entropy`` is not used: it takes a bare weight (no adapters, nothing between head and scores),
# a bf16 input gives it a bf16 loss, tokens have no weights of their own, and torch 2.11 lacks it.
#
# Dimension suffixes: ``N`` tokens, ``C`` tokens of a chunk, ``H`` features, ``V`` words of the vocabulary.


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
        targets_N: (N,), words; :data:`~dryfit.tasks.lm_loss.IGNORED` for a token that is not learned.
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
