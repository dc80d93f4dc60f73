"""Answers that a causal language model generates, and their metrics."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any, Final, cast, final

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from dryfit.meta.configs import most_tokens
from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.splits import derive_seed
from dryfit.settings.tables import LmSettings
from dryfit.settings.user_code import FunctionName, check_call, imported_function, raised, source_file, source_hash
from dryfit.tasks.base import Measured
from dryfit.tasks.prompts import ROLES, PromptPart, PromptTokenizer, TokenRole, parts_of
from dryfit.tasks.scored_rows import TEXT, ScoredRow
from dryfit.tasks.tokens import TokenSet
from dryfit.tasks.windows import word_spans

# Metrics of generated answers: exact match, the F1 of quoted words, and those of a user's own function.


_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
"""Names that ``study.metric`` can have."""

_FURTHER: Final = ("ids", "prompts")
"""Lists that a user's function is given if it has parameters of these names."""

_WANTED: Final = "a function of two lists of texts, the generated answers and the wanted ones, that returns numbers"


@dataclass(frozen=True, slots=True)
class Prompted:
    """Prompts, in order, and the wanted answers.

    Attributes:
        ids: Of the rows, with the part where a row has two prompts.
        prompts: The prompts.
        wanted: What should be answered, without white space around it.
        quotes: Whether a prompt asks for evidence.
    """

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    wanted: tuple[str, ...]
    quotes: tuple[bool, ...]


@final
@dataclass(frozen=True, slots=True)
class Answered(Prompted):
    """Generated answers to some prompts.

    Attributes:
        answers: What was generated, without white space around it.
    """

    answers: tuple[str, ...]


def scored_answers(answered: Answered, none: str) -> list[ScoredRow]:
    """Return each prompt with its answer beside the wanted one: whether they are equal, and the F1 of quoted words.

    Args:
        answered: The answers.
        none: The answer where a row has no evidence. Where only one of answer and wanted text is it, the F1 is 0.
    """
    rows: list[ScoredRow] = []
    every = zip(answered.ids, answered.answers, answered.wanted, answered.quotes, strict=True)
    for name, said, wanted, quoted in every:
        values: dict[str, float] = {Metric.EXACT_MATCH: float(said == wanted)}
        if quoted:
            same = float(said == wanted) if none in (said, wanted) else words_f1(said, wanted)
            values[Metric.TOKEN_F1] = same
        rows.append(ScoredRow(name, {TEXT: wanted}, {TEXT: said}, values=values))
    return rows


def measured(lm: LmSettings, examples: Sequence[int], answered: Answered) -> Measured:
    """Return the metrics of generated answers.

    Args:
        lm: The ``[lm]`` table.
        examples: Which of a split's examples were answered.
        answered: The answers.

    Raises:
        ConfigError: The user's own function raises, or returns something else than before.
    """
    scored = scored_answers(answered, lm.no_evidence.strip())
    values = {str(Metric.EXACT_MATCH): mean_of(Metric.EXACT_MATCH, scored)}
    if PromptPart.EVIDENCE in parts_of(lm):
        values[Metric.TOKEN_F1] = mean_of(Metric.TOKEN_F1, scored)
    if lm.metric is not None:
        own = answer_metric(lm.metric).of(answered)
        values |= {name: found.value for name, found in own.items()}
        scored = [
            replace(row, values={**row.values, **{name: found.rows[at] for name, found in own.items() if found.rows}})
            for at, row in enumerate(scored)
        ]
    return Measured(values, dict(zip(examples, scored, strict=True)))


def mean_of(metric: str, rows: Sequence[ScoredRow]) -> float:
    """Return the mean of a metric over the prompts that have it; NaN where none has."""
    found = [row.values[metric] for row in rows if metric in row.values]
    return sum(found) / len(found) if found else math.nan


def words_f1(said: str, wanted: str) -> float:
    """Return the F1 of two texts' words, each counted as often as it is there.

    As SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), but case, punctuation and articles count, as in the task
    ``evidence``; 1 where neither has a word.
    """
    first, second = _words(said), _words(wanted)
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 1.0


def _words(text: str) -> Counter[str]:
    return Counter(text[start:end] for start, end in word_spans(text).tolist())


@dataclass(frozen=True, slots=True)
class OwnNumber:
    """A number of a user's function.

    Attributes:
        value: Of all answers together.
        rows: Of each answer, whose mean is the value; empty where the function does not say.
    """

    value: float
    rows: tuple[float, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class AnswerMetric:
    """A user's own function of generated answers.

    Attributes:
        name: ``file.py:function`` without the folder.
        function: It is called with lists of answers and wanted texts; with ``ids`` and ``prompts`` by name, if it has
            parameters of these names.
        file: Where it is defined; None: unknown.
        names: Of the numbers that it returned for a small example.
    """

    name: str
    function: Callable[..., object]
    file: Path | None
    names: tuple[str, ...]

    def of(self, answered: Answered) -> dict[str, OwnNumber]:
        """Return its numbers for some answers, by name.

        Raises:
            ConfigError: It raises, or does not return numbers by the names that it gave before.
        """
        found = _called(self.name, self.function, self.file, answered)
        if tuple(found) != self.names:
            raise ConfigError(
                f"measuring answers by {self.name}",
                f"it returned {', '.join(found) or 'nothing'}",
                f"the numbers that it returned for the first answers that it was given: {', '.join(self.names)}",
            )
        return found

    @property
    def source(self) -> str:
        """A hash of the file that defines it."""
        return source_hash(self.file)


_EXAMPLE: Final = Answered(
    ids=("a", "b"), prompts=("?", "?"), answers=("yes", "none"), wanted=("yes", "no"), quotes=(True, True)
)


@cache
def answer_metric(name: str) -> AnswerMetric:
    """Import a user's function and call it once, on two short answers, to learn the names of its numbers.

    Args:
        name: ``package.module:function`` or ``file.py:function``, with the folder that it is imported from before it,
            unless it is installed.

    Raises:
        ConfigError: There is no such function, it raises, or it returns something else than numbers with names that
            are free.
    """
    parsed = FunctionName.parse(name)
    doing = f"importing lm.metric = {parsed.short}"
    function = imported_function(parsed, doing, _WANTED)
    file = source_file(function)
    names = tuple(_called(parsed.short, function, file, _EXAMPLE))
    for one in names:
        if not _NAME.fullmatch(one) or one in list(Metric):
            taken = "is the name of one of dryfit's own metrics" if one in list(Metric) else "is no name of a metric"
            allowed = "names of small letters, digits and _, that no metric of dryfit's has"
            raise ConfigError(
                doing, f"{one!r} {taken}", allowed, "return a dict with other names, or rename the function"
            )
    return AnswerMetric(parsed.short, function, file, names)


def _called(name: str, function: Callable[..., object], file: Path | None, answered: Answered) -> dict[str, OwnNumber]:
    """Call a user's function; a number alone, or a list of them, has the function's own name.

    Raises:
        ConfigError: It cannot be called so, raises, or returns something else than numbers.
    """
    doing = f"measuring answers by {name}"
    further = {key: list(getattr(answered, key)) for key in _FURTHER if key in _parameters(function)}
    check_call(function, doing, _WANTED, [], [], **further)
    try:
        said = function(list(answered.answers), list(answered.wanted), **further)
    except (Exception, SystemExit) as error:
        raise ConfigError(doing, raised(error, file), _WANTED) from error
    own = name.rpartition(":")[2].rpartition(".")[2]
    values = cast("Mapping[Any, Any]", said) if isinstance(said, Mapping) else {own: said}
    numbers = {key: _number(value, len(answered.ids)) for key, value in values.items()}
    wrong = [key for key, number in numbers.items() if not isinstance(key, str) or number is None]
    if wrong or not numbers:
        where = f"{wrong[0]!r}: {values[wrong[0]]!r:.60}" if wrong else "an empty dict"
        raise ConfigError(
            doing, f"it returned {where}", "a number, a list of one for each answer, or a dict of these by their names"
        )
    return {str(key): number for key, number in numbers.items() if number is not None}


def _number(said: Any, answers: int) -> OwnNumber | None:
    """Return what a function said as a number; of a list, one for each answer, their mean. None: it is neither."""
    plain = said.tolist() if hasattr(said, "tolist") else said  # NumPy's and torch's
    if isinstance(plain, Real):
        return OwnNumber(float(plain))
    if not isinstance(plain, list | tuple) or len(cast("Sequence[Any]", plain)) != answers:
        return None
    rows = cast("Sequence[Any]", plain)
    if not all(isinstance(one, Real) for one in rows):
        return None
    each = tuple(float(one) for one in rows)
    return OwnNumber(sum(each) / answers, each if all(map(math.isfinite, each)) else ())


def _parameters(function: Callable[..., object]) -> Sequence[str]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:
        return ()


# Generation of answers by a causal language model, greedy or by beam search.
#
# Dimension suffixes: ``B`` prompts, or beams of all prompts, ``L`` tokens, ``V`` words of the vocabulary.


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
class Asked(Prompted):
    """Prompts of a split.

    Attributes:
        questions: Token ids of each prompt.
    """

    questions: tuple[list[int], ...]

    def answered(self, answers: Sequence[str]) -> Answered:
        """Return the prompts with their answers, in order."""
        said = tuple(one.strip() for one in answers)
        return Answered(self.ids, self.prompts, self.wanted, self.quotes, said)


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
    return Asked(tuple(tokens.names_of(examples)), texts, tuple(wanted), tuple(quotes), tuple(questions))


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
