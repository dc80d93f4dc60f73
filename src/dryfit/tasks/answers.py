"""Answers that a causal language model generates: the likeliest token each time, until it ends or has no room.

Dimension suffixes: ``B`` prompts, ``L`` tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from dryfit.core.seeds import derive_seed
from dryfit.meta.configs import most_tokens
from dryfit.tasks.prompt_tokens import ROLES, PromptTokenizer, Role
from dryfit.tasks.tokens import TokenSet


def sampled(count: int, wanted: int, seed: int) -> list[int]:
    """Some of so many examples, in order: the same ones for the same arguments."""
    if wanted >= count:
        return list(range(count))
    generator = torch.Generator().manual_seed(derive_seed(seed, "generate"))
    return sorted(torch.randperm(count, generator=generator)[:wanted].tolist())


def exact_match(generated: Sequence[str], wanted: Sequence[str]) -> float:
    """Share of the answers that are as they should be; white space around them is not looked at."""
    same = [one.strip() == other.strip() for one, other in zip(generated, wanted, strict=True)]
    return sum(same) / len(same)


def matches(
    decoder: nn.Module,
    tokens: TokenSet,
    examples: Sequence[int],
    prompts: PromptTokenizer,
    *,
    max_new_tokens: int,
    batch_rows: int,
    beat: Callable[[], None],
) -> float:
    """Exact match of the answers to some examples of a split.

    Args:
        decoder: On its device, in eval mode; see :func:`answer`.
        tokens: The split; each row is one example.
        examples: Which ones.
        prompts: Makes text of ids.
        max_new_tokens: Longest answer that is generated.
        batch_rows: Prompts at once.
        beat: Called once a batch, as a sign of life.
    """
    asked: list[list[int]] = []
    wanted: list[str] = []
    for example in examples:
        first, end = int(tokens.starts_R[example]), int(tokens.starts_R[example + 1])
        answered_T = tokens.extra[ROLES][first:end] & Role.ANSWER != 0
        answer_at = first + int(answered_T.int().argmax())
        asked.append(tokens.ids_T[first:answer_at].tolist())
        wanted.append(prompts.text_of(tokens.ids_T[answer_at:end].tolist()))
    found = answer(decoder, asked, prompts, max_new_tokens=max_new_tokens, batch_rows=batch_rows, beat=beat)
    return exact_match(found, wanted)


def answer(
    decoder: nn.Module,
    asked: Sequence[Sequence[int]],
    prompts: PromptTokenizer,
    *,
    max_new_tokens: int,
    batch_rows: int,
    beat: Callable[[], None],
) -> list[str]:
    """What a model answers to some prompts, in their order. Draws no random number.

    Args:
        decoder: A causal language model in eval mode, with or without adapters.
        asked: The ids of each prompt, one at least.
        prompts: Makes text of ids.
        max_new_tokens: Longest answer.
        batch_rows: Prompts at once, those of similar length together.
        beat: Called once a batch, as a sign of life.
    """
    model: Any = decoder
    # What comes with a model (a temperature, a penalty of repetition) would fill what this leaves open.
    model.generation_config = GenerationConfig()
    limit = most_tokens(model.config)
    device = next(decoder.parameters()).device
    order = sorted(range(len(asked)), key=lambda index: -len(asked[index]))
    texts = [""] * len(asked)
    with torch.inference_mode():
        for start in range(0, len(order), batch_rows):
            rows = order[start : start + batch_rows]
            ids_BL, mask_BL = _padded_left([asked[row] for row in rows], prompts.pad_id)
            room = max_new_tokens if limit is None else max(1, limit - ids_BL.shape[1] + 1)
            greedy = GenerationConfig(
                max_new_tokens=min(max_new_tokens, room),  # each but the last needs a position of its own
                do_sample=False,
                num_beams=1,
                use_cache=True,
                eos_token_id=prompts.end_id,
                pad_token_id=prompts.pad_id,
            )
            found_BL = model.generate(
                input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device), generation_config=greedy
            )
            for row, ids in zip(rows, found_BL[:, ids_BL.shape[1] :].tolist(), strict=True):
                texts[row] = prompts.text_of(_until(ids, prompts.end_id))
            beat()
    return texts


def _padded_left(asked: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids in asked)
    ids_BL = torch.full((len(asked), width), pad_id, dtype=torch.int64)
    mask_BL = torch.zeros_like(ids_BL)
    for row, ids in enumerate(asked):
        ids_BL[row, width - len(ids) :] = torch.tensor(ids)
        mask_BL[row, width - len(ids) :] = 1
    return ids_BL, mask_BL


def _until(ids: Sequence[int], end_id: int) -> Sequence[int]:
    """What comes before the end; rows that ended early are padded behind it."""
    return ids[: ids.index(end_id)] if end_id in ids else ids
