"""Generation of answers by a causal language model, greedy or by beam search.

Dimension suffixes: ``B`` prompts, or beams of all prompts, ``L`` tokens, ``V`` words of the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any, Final, cast, final

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from dryfit.core.seeds import derive_seed
from dryfit.meta.loading.configs import most_tokens
from dryfit.tasks.lm.answer_metrics import Answered
from dryfit.tasks.tokens.prompt_tokens import ROLES, PromptTokenizer, TokenRole
from dryfit.tasks.tokens.token_set import TokenSet

PROMPTS_AT_ONCE: Final = 8
"""Most prompts that are answered together."""


def sampled(count: int, wanted: int, seed: int) -> list[int]:
    """Return the indices of a fixed random sample of examples, ascending."""
    if wanted >= count:
        return list(range(count))
    generator = torch.Generator().manual_seed(derive_seed(seed, "generate"))
    return sorted(torch.randperm(count, generator=generator)[:wanted].tolist())


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts of a split, and the wanted answers.

    Attributes:
        ids: Of the rows, with the part where a row has two prompts.
        questions: Token ids of each prompt.
        prompts: The same as texts.
        wanted: What should be answered, without white space around it.
        quotes: Whether a prompt asks for evidence.
    """

    ids: tuple[str, ...]
    questions: tuple[list[int], ...]
    prompts: tuple[str, ...]
    wanted: tuple[str, ...]
    quotes: tuple[bool, ...]

    def answered(self, answers: Sequence[str]) -> Answered:
        """Return the prompts with their answers, in order."""
        said = tuple(one.strip() for one in answers)
        return Answered(self.ids, self.prompts, said, self.wanted, self.quotes)


def asked_of(tokens: TokenSet, examples: Sequence[int], prompts: PromptTokenizer) -> Asked:
    """Return the prompts of some examples of a split, each of which is a row of it.

    Args:
        tokens: The split.
        examples: Which ones.
        prompts: Decodes ids.
    """
    questions: list[list[int]] = []
    wanted: list[str] = []
    quotes: list[bool] = []
    for example in examples:
        first, end = int(tokens.starts_R[example]), int(tokens.starts_R[example + 1])
        roles_T = tokens.extra[ROLES][first:end]
        answer_at = first + int((roles_T & TokenRole.ANSWER != 0).int().argmax())
        quotes.append(not int(roles_T[0]) & TokenRole.CRITERIA)
        questions.append(tokens.ids_T[first:answer_at].tolist())
        wanted.append(prompts.text_of(tokens.ids_T[answer_at:end].tolist()).strip())
    texts = tuple(prompts.text_of(ids) for ids in questions)
    return Asked(tuple(tokens.names_of(examples)), tuple(questions), texts, tuple(wanted), tuple(quotes))


def answer(
    decoder: nn.Module,
    asked: Sequence[Sequence[int]],
    prompts: PromptTokenizer,
    *,
    max_new_tokens: int,
    batch_rows: int,
    beat: Callable[[], None],
    num_beams: int = 1,
) -> list[str]:
    """Return a model's answers to some prompts, in their order. Draws no random number.

    Args:
        decoder: A causal language model in eval mode, with or without adapters.
        asked: The ids of each prompt, one at least.
        prompts: Decodes ids.
        max_new_tokens: Longest answer.
        batch_rows: Prompts at once, those of similar length together.
        beat: Called once a batch, as a sign of life.
        num_beams: Beams of a beam search, whose best answer has the highest mean log probability of a token; 1: the
            likeliest token is taken each time.
    """
    model: Any = decoder
    # A model's own generation config (temperature, repetition penalty) would fill what is left open here.
    model.generation_config = GenerationConfig()
    limit = most_tokens(model.config)
    device = next(decoder.parameters()).device
    order = sorted(range(len(asked)), key=lambda index: -len(asked[index]))
    texts = [""] * len(asked)
    with torch.inference_mode():
        for room, rows in _batches(order, lambda row: _room(max_new_tokens, len(asked[row]), limit), batch_rows):
            ids_BL, mask_BL = _padded_left([asked[row] for row in rows], prompts.pad_id)
            likeliest = GenerationConfig(
                max_new_tokens=room,
                do_sample=False,
                num_beams=num_beams,
                use_cache=True,
                eos_token_id=prompts.end_id,
                pad_token_id=prompts.pad_id,
            )
            answers_BL = model.generate(
                input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device), generation_config=likeliest
            )
            for row, ids in zip(rows, answers_BL[:, ids_BL.shape[1] :].tolist(), strict=True):
                texts[row] = prompts.text_of(_until(ids, prompts.end_id))
            beat()
    return texts


def rehearse(base: PreTrainedModel, rows: int, length: int, *, max_new_tokens: int, num_beams: int = 1) -> None:
    """Run the parts of :func:`answer` that take most memory: reading the prompts, and the last token.

    The loop is that of ``GenerationMixin._sample`` in transformers: keys and values of all tokens are kept, each new
    token makes a layer's grow by a copy, and the scores of the last position are copied in fp32. With several beams it
    is that of ``_beam_search``: each prompt is there once for each beam from the start, the scores of a token and their
    logarithms live until the next one has its own, and between two tokens each layer's keys and values are copied into
    the order of the beams that go on.

    Args:
        base: The language model without the wrapper of its adapters, in eval mode; its tensors may be fakes.
        rows: Prompts.
        length: Tokens of each.
        max_new_tokens: Longest answer.
        num_beams: Beams of each prompt.
    """
    device = next(base.parameters()).device
    cache, beams = DynamicCache(config=base.config), rows * num_beams
    new = _room(max_new_tokens, length, most_tokens(base.config))
    with torch.no_grad():
        kept = _found_so_far(rows, num_beams, length + new, device)
        scores = _next_token(base, cache, torch.zeros((beams, length), dtype=torch.int64, device=device), num_beams)
        if new == 1:
            return
        for layer in cache.layers:
            if all(isinstance(getattr(layer, name, None), torch.Tensor) for name in ("keys", "values")):
                # Bound to no name: the copy replaces the old tensor.
                layer.update(_more_of(layer.keys, new - 2), _more_of(layer.values, new - 2))  # pyright: ignore
        last = _next_token(base, cache, torch.zeros((beams, 1), dtype=torch.int64, device=device), num_beams)
        del kept, scores, last


def _found_so_far(rows: int, num_beams: int, length: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return what a beam search keeps of the answers: tokens of those that run, and of those that have ended."""
    if num_beams == 1:
        return ()
    return tuple(torch.zeros((rows, num_beams, length), dtype=torch.int64, device=device) for _ in range(2))


def _next_token(
    base: PreTrainedModel, cache: DynamicCache, ids_BL: torch.Tensor, num_beams: int
) -> tuple[torch.Tensor, ...]:
    """Return what lives on until the next token's scores."""
    rows, known = ids_BL.shape[0], cache.get_seq_length()
    mask_BL = torch.ones((rows, known + ids_BL.shape[1]), dtype=torch.int64, device=ids_BL.device)
    places_BL = mask_BL.cumsum(dim=-1)[:, known:] - 1  # of each row: padding on the left shifts them
    options = {"position_ids": places_BL, "logits_to_keep": 1}
    taken = {name: options[name] for name in options if name in signature(base.forward).parameters}
    outputs = base(input_ids=ids_BL, attention_mask=mask_BL, past_key_values=cache, use_cache=True, **taken)
    scores_BV = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    if num_beams == 1:
        scores_BV.argmax(dim=-1)
        return ()
    logs_BV = scores_BV.log_softmax(dim=-1)
    del outputs
    logs_BV = logs_BV + torch.zeros((rows, 1), device=ids_BL.device)
    logs_BV.view(rows // num_beams, -1).topk(2 * num_beams)
    cache.reorder_cache(cast("torch.LongTensor", torch.arange(rows, device=ids_BL.device)))
    return scores_BV, logs_BV


def _more_of(kept: torch.Tensor, count: int) -> torch.Tensor:
    """Return keys or values of further tokens in the memory of one; tokens are the last dimension but one."""
    return kept.new_empty((*kept.shape[:-2], 1, kept.shape[-1])).expand(*kept.shape[:-2], count, kept.shape[-1])


def _batches(
    order: Sequence[int], room_of: Callable[[int], int], batch_rows: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield rows that have room for answers of one length: a row's answer depends on no other row of its batch."""
    for room, group in groupby(order, room_of):
        same = list(group)
        for start in range(0, len(same), batch_rows):
            yield room, same[start : start + batch_rows]


def _room(wanted: int, width: int, limit: int | None) -> int:
    """Return how many tokens an answer may have; each but the last needs a position."""
    return wanted if limit is None else min(wanted, max(1, limit - width + 1))


def _padded_left(asked: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids in asked)
    ids_BL = torch.full((len(asked), width), pad_id, dtype=torch.int64)
    mask_BL = torch.zeros_like(ids_BL)
    for row, ids in enumerate(asked):
        ids_BL[row, width - len(ids) :] = torch.tensor(ids)
        mask_BL[row, width - len(ids) :] = 1
    return ids_BL, mask_BL


def _until(ids: Sequence[int], end_id: int) -> Sequence[int]:
    """Return the ids before the end token; rows that ended early are padded behind it."""
    return ids[: ids.index(end_id)] if end_id in ids else ids
