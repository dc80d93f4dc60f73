"""The model and the loss of the task ``causal-lm``: each token from those before it.

Dimension suffixes: ``B`` sequences, ``L`` tokens, ``V`` words of the vocabulary, ``N`` tokens of all sequences.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Final, final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import nn

from dryfit.core.errors import ConfigError
from dryfit.tasks.base import Batch
from dryfit.tasks.prompt_tokens import PART, PROMPT_TOKENS
from dryfit.tasks.prompts import Part
from dryfit.tasks.tokens import TokenSet

IGNORED: Final = -100
"""Label of a token that is not learned: padding, a prompt, or the first of an example."""

_SAME: Final = 1e-6
"""Of the largest score: what masked tokens may add. It is nothing: their weights are zero."""

_CLOSE: Final = 2e-2
"""Of the largest score: what other shapes may round to in half precision."""


@final
class CausalLm(nn.Module):
    """Scores of the next token; no cache of keys and values is kept.

    Args:
        decoder: A causal language model, with or without adapters.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Score the vocabulary after each token.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            position_ids: (B, L), of sequences with several examples: each begins at 0, and so does the padding.
                transformers then keeps examples from seeing each other, if no mask is given.

        Returns:
            (B, L, V).
        """
        if position_ids is None:
            return self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


@final
class CausalLmLoss:
    """Cross entropy of each token that is learned, given those before it; tokens may weigh differently."""

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Weights of the tokens that are learned, together; their number where they weigh the same."""
        learned_BL = batch["labels"][:, 1:] != IGNORED
        if "weights" in batch:
            return batch["weights"][:, 1:].masked_fill(~learned_BL, 0.0).sum()
        return learned_BL.sum()

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed over tokens, in fp32 or better.

        Labels are shifted and not the scores: a shifted view of them would be copied.
        """
        scores = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(0, 1)
        next_N = _next(batch["labels"], outputs.shape[1], IGNORED)
        if "weights" not in batch:
            return F.cross_entropy(scores, next_N, ignore_index=IGNORED, reduction="sum")
        losses_N = F.cross_entropy(scores, next_N, ignore_index=IGNORED, reduction="none")
        return (losses_N * _next(batch["weights"], outputs.shape[1], 0.0).to(losses_N.dtype)).sum()


def _next(values_BL: torch.Tensor, width: int, after: float) -> torch.Tensor:
    """What belongs to each position's next token, flat; a micro-batch is as wide as its own longest sequence."""
    return F.pad(values_BL[:, 1:width], (0, 1), value=after).flatten()


def collate_examples(
    tokens: TokenSet, packs: Sequence[Sequence[int]], *, pad_id: int, learn_prompt: bool, mix: float | None
) -> Batch:
    """The batch of some sequences, padded on the right to the longest of them.

    Args:
        tokens: A split of examples, see :func:`dryfit.tasks.prompt_tokens.example_set`.
        packs: The examples of each sequence.
        pad_id: Token that pads sequences.
        learn_prompt: Learn prompts too.
        mix: Weight of a token of a criteria answer, ``1 - mix`` for one of evidence; None: all weigh the same.

    Returns:
        ``input_ids``, ``attention_mask``, ``labels`` and, with ``mix``, ``weights``, each (B, L). Where a sequence has
        several examples, ``position_ids`` too.
    """
    lengths_R = tokens.lengths_R
    width = max(sum(int(lengths_R[example]) for example in pack) for pack in packs)
    batch = {
        "input_ids": torch.full((len(packs), width), pad_id, dtype=torch.int64),
        "attention_mask": torch.zeros((len(packs), width), dtype=torch.int64),
        "labels": torch.full((len(packs), width), IGNORED, dtype=torch.int64),
    }
    if mix is not None:
        batch["weights"] = torch.zeros((len(packs), width), dtype=torch.float64)
    if any(len(pack) > 1 for pack in packs):
        batch["position_ids"] = torch.zeros((len(packs), width), dtype=torch.int64)
    for row, pack in enumerate(packs):
        end = 0
        for example in pack:
            first, end = end, end + int(lengths_R[example])
            _put(batch, row, slice(first, end), tokens, example, learn_prompt=learn_prompt, mix=mix)
        if "position_ids" in batch:
            batch["position_ids"][row, end:] = torch.arange(width - end)
    return batch


def check_packing(model: CausalLm) -> None:
    """Refuse sequences of several examples for a decoder in which one would change another.

    The decoder is asked: a second example is scored behind two different first ones, and alone. It does not matter what
    its weights are, or how it comes that it sees what it should not.

    Raises:
        ConfigError: The second example's scores are not its own.
    """
    doing, allowed = "checking lm.packing = true", "lm.packing = false for this model"
    decoder: Any = model.decoder
    name = decoder.config.model_type
    if "position_ids" not in inspect.signature(_plain(decoder).forward).parameters:
        raise ConfigError(doing, f"{name} takes no positions", allowed)
    device = next(model.parameters()).device
    ids_BL = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 8, 9, 10]], device=device) % decoder.config.vocab_size
    positions_BL = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device).expand(2, -1)
    mask_BL = torch.ones_like(ids_BL)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        packed_BLV = model(ids_BL, mask_BL, positions_BL)[:, 3:].float()
        alone_LV = model(ids_BL[:1, 3:], mask_BL[:1, 3:])[0].float()
    model.train(was_training)
    size = float(alone_LV.abs().max())
    seen = float((packed_BLV[0] - packed_BLV[1]).abs().max())
    moved = float((packed_BLV[0] - alone_LV).abs().max())
    if not (seen <= _SAME * size and moved <= _CLOSE * size):
        found = f"examples in one sequence see each other in {name}: scores change by {max(seen, moved):.2g}"
        raise ConfigError(doing, f"{found} of {size:.2g}", allowed)


def _plain(decoder: Any) -> Any:
    """The model under its adapters: PEFT's own takes anything."""
    return decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder


def _put(
    batch: Batch, row: int, place: slice, tokens: TokenSet, example: int, *, learn_prompt: bool, mix: float | None
) -> None:
    """Write one example into its place of a batch."""
    ids = tokens.ids_T[int(tokens.starts_R[example]) : int(tokens.starts_R[example + 1])].long()
    prompt, part = tokens.labels_R[example, PROMPT_TOKENS], int(tokens.labels_R[example, PART])
    # The first token has none before it: what would predict it is the end of another example.
    unlearned = 1 if learn_prompt else max(1, int(prompt))
    batch["input_ids"][row, place] = ids
    batch["attention_mask"][row, place] = 1
    batch["labels"][row, place.start + unlearned : place.stop] = ids[unlearned:]
    if mix is not None:
        batch["weights"][row, place] = mix if part == Part.CRITERIA else 1 - mix
    if "position_ids" in batch:
        batch["position_ids"][row, place] = torch.arange(len(ids))
