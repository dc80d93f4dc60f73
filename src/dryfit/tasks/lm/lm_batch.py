"""Batches of a causal language model: sequences of one or several examples, with labels.

Dimension suffixes: ``B`` sequences, ``L`` tokens, ``T`` the tokens of one of them.
"""

from collections.abc import Sequence
from typing import Final

import torch

from dryfit.tasks.base import Batch, pad_rows, padded
from dryfit.tasks.tokens.prompt_tokens import ROLES, TokenRole
from dryfit.tasks.tokens.token_set import TokenSet

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
        tokens: See :func:`dryfit.tasks.tokens.prompt_tokens.sequences`.
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
