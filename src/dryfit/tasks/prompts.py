"""Prompts and wanted answers of a causal language model, as text and as token ids."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Final, final

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.tables import LmSettings
from dryfit.tasks.rows import Row, UnlabelledRow
from dryfit.tasks.tokens import TokenSet

# Prompts and wanted answers of a causal language model, made from rows.


class PromptPart(IntEnum):
    """What a prompt asks for."""

    WHOLE = 0
    """A plain text, or the answer to an instruction."""
    CRITERIA = 1
    EVIDENCE = 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its answer.

    Attributes:
        name: The row's id, with the part where a row has two prompts.
        template: The prompt with ``{criterion}`` and ``{text}``; None: there is no prompt.
        criterion: Value of the first; None where rows have no criterion.
        text: Value of the second, the only part of a prompt that may be cut.
        answer: The text to learn.
        part: What the prompt asks for.
        place: Where the row came from, for messages.
    """

    name: str
    template: str | None
    criterion: str | None
    text: str
    answer: str
    part: PromptPart
    place: str

    def prompt(self, characters: int | None = None) -> str:
        """Return the prompt with the first characters of the text; None: with all of them."""
        if self.template is None:
            return ""
        return self.template.format(criterion=self.criterion, text=self.text[:characters])


def answer_words(lm: LmSettings, num_labels: int) -> tuple[str, ...]:
    """Return the word of each label.

    Raises:
        ConfigError: There is not one word for each label, or two are the same.
    """
    words = tuple(word.strip() for word in lm.answers.split(","))
    if len(words) != num_labels or not all(words) or len(set(words)) < len(words):
        raise ConfigError(
            "reading lm.answers",
            f"{lm.answers!r} has {len(words)} words, and data.num_labels is {num_labels}",
            allowed="a different word for each label from 0, with commas between them",
            hint='lm.answers = "no,yes" for two labels',
        )
    return words


def exchanges(row: Row, lm: LmSettings, words: Sequence[str]) -> tuple[Exchange, ...]:
    """Return the prompts of a row with their answers.

    Args:
        row: A checked row.
        lm: The ``[lm]`` table.
        words: Of the labels; used where the format asks for them.

    Raises:
        DataError: The row has no criterion, and a prompt asks for it.
    """
    answers = {
        PromptPart.WHOLE: row.text,
        PromptPart.EVIDENCE: "\n".join(row.text[start:end] for start, end in row.evidence),
    }
    if PromptPart.CRITERIA in parts_of(lm):
        assert isinstance(row.label, int)  # several labels are refused with the study file
        answers[PromptPart.CRITERIA] = words[row.label]
    answers[PromptPart.EVIDENCE] = answers[PromptPart.EVIDENCE] or lm.no_evidence
    return tuple(_exchange(row, row.id, part, lm, answers[part]) for part in parts_of(lm))


def questions(row: UnlabelledRow, lm: LmSettings) -> tuple[Exchange, ...]:
    """Return the prompts of a row to predict, without answers; in the format ``text`` the text is continued.

    Raises:
        DataError: The row has no criterion, and a prompt asks for it.
    """
    if lm.format == "text":
        return (Exchange(row.id or row.place, "{text}", None, row.text, "", PromptPart.WHOLE, row.place),)
    return tuple(_exchange(row, row.id or row.place, part, lm, "") for part in parts_of(lm))


def parts_of(lm: LmSettings) -> tuple[PromptPart, ...]:
    """Return the parts of each row's prompts."""
    match lm.format:
        case "text" | "instruction":
            return (PromptPart.WHOLE,)
        case "criteria":
            return (PromptPart.CRITERIA,)
        case "evidence":
            return (PromptPart.EVIDENCE,)
        case "both":
            return PromptPart.CRITERIA, PromptPart.EVIDENCE


def _exchange(row: Row | UnlabelledRow, name: str, part: PromptPart, lm: LmSettings, answer: str) -> Exchange:
    templates = {
        PromptPart.WHOLE: "{criterion}" if lm.format == "instruction" else None,
        PromptPart.CRITERIA: lm.criteria_prompt,
        PromptPart.EVIDENCE: lm.evidence_prompt,
    }
    template = templates[part]
    if row.criterion is None and template is not None and "{criterion}" in template:
        raise DataError(
            f"making the prompt of {row.place}",
            "the row has no criterion",
            allowed=f"rows with a criterion, as the prompt has it: {template[:60]!r}",
            hint="name its column with data.criterion, or write a prompt without {criterion}",
        )
    return Exchange(
        name=f"{name} ({part.name.lower()})" if lm.format == "both" else name,
        template=template,
        criterion=row.criterion,
        text=row.text if part is not PromptPart.WHOLE else "",
        answer=answer,
        part=part,
        place=row.place,
    )


# Prompts and answers as token ids; where both do not fit, the prompt's text is cut, never the answer.
#
# Prompt and answer are tokenised separately, so that the learned tokens are those generated after the prompt.
#
# Dimension suffixes: ``T`` all tokens of a split one after another, ``R`` examples: prompts with their answers.


ROLES: Final = "roles"
"""Entry of ``TokenSet.extra`` with the role of each token, uint8."""


class TokenRole(IntFlag):
    """Role of a token; flags."""

    FIRST = 1
    """It begins an example."""
    ANSWER = 2
    """It is part of an answer, or its end."""
    CRITERIA = 4
    """Its example asks for the criteria answer."""


_FEW_SPARE: Final = 2
_MOST_CUTS: Final = 24


@dataclass(frozen=True, slots=True)
class Example:
    """An exchange as token ids.

    Attributes:
        name: Of the exchange.
        ids: Of prompt and answer, with the token that ends the answer.
        prompt_tokens: Tokens of the prompt.
        part: What the prompt asks for.
        cut: Characters of the text that were cut.
    """

    name: str
    ids: tuple[int, ...]
    prompt_tokens: int
    part: PromptPart
    cut: int = 0


@final
class PromptTokenizer:
    """Tokenises exchanges into examples.

    Args:
        tokenizer: The model's.
        lm: The ``[lm]`` table.
        max_length: Most tokens of an example.

    Raises:
        ConfigError: The tokenizer has no token that ends a text, or no chat template and one is asked for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, lm: LmSettings, max_length: int) -> None:
        end = tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError(
                "tokenising the data", "the tokenizer has no token that ends a text", allowed="a decoder's tokenizer"
            )
        self.end_id = end
        self.pad_id = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else end
        self._tokenizer: Any = tokenizer  # its annotations are incomplete
        self._chat = _chats(tokenizer, lm)
        self._max_length = max_length
        alone = tokenizer("", add_special_tokens=True)["input_ids"]
        begin = tokenizer.bos_token_id
        self._start = [begin] if isinstance(begin, int) and alone[:1] == [begin] else []

    def examples(self, exchanges: Iterable[Exchange]) -> Iterator[Example]:
        """Yield one example of each exchange; of one without a prompt as many as its text needs.

        Raises:
            DataError: An answer, or a prompt without its text, does not fit.
        """
        for exchange in exchanges:
            if exchange.template is None:
                yield from self._pieces(exchange)
            else:
                yield self._asked(exchange)

    def question(self, exchange: Exchange, *, room: int) -> tuple[list[int], int]:
        """Return the ids of a prompt to be answered, and how many characters of its text were cut.

        Args:
            exchange: Its answer is ignored.
            room: Tokens reserved for the answer.

        Raises:
            DataError: The prompt does not fit even without its text.
        """
        return self._cut_to(exchange, self._max_length - room, f"{room} tokens are kept for the answer")

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's ids, without the token that ends it."""
        kept = [one for one in ids if one != self.end_id]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _asked(self, exchange: Exchange) -> Example:
        answer = [*self._plain(exchange.answer), self.end_id]
        prompt, cut = self._cut_to(exchange, self._max_length - len(answer), f"the answer has {len(answer)} tokens")
        return Example(exchange.name, (*prompt, *answer), len(prompt), exchange.part, cut)

    def _pieces(self, exchange: Exchange) -> Iterator[Example]:
        """Yield a plain text; what is too long for one example continues in the next."""
        ids = [*self._plain(exchange.answer), self.end_id]
        room = self._max_length - len(self._start)
        for number, first in enumerate(range(0, len(ids), room)):
            name = f"{exchange.name} (piece {number + 1})" if len(ids) > room else exchange.name
            yield Example(name, (*self._start, *ids[first : first + room]), len(self._start), exchange.part)

    def _cut_to(self, exchange: Exchange, room: int, why: str) -> tuple[list[int], int]:
        """Return the longest prompt that fits, with its text cut at the end, by interpolation search.

        The number of tokens is about linear in that of characters, so the next cut is guessed from the last two.
        """
        whole = len(exchange.text)
        ids = self._prompt(exchange, whole)
        if len(ids) <= room:
            return ids, 0
        high, high_tokens = whole, len(ids)
        low, fitting = 0, self._prompt(exchange, 0)
        if len(fitting) > room:
            raise DataError(
                f"tokenising {exchange.place}",
                f"its prompt has {len(fitting)} tokens without its text, and {why}",
                allowed=f"{self._max_length} tokens together (train.max_length)",
                hint="raise train.max_length, or shorten the criterion, the prompt or the answer",
            )
        for _ in range(_MOST_CUTS):
            if high - low <= 1 or room - len(fitting) <= _FEW_SPARE:
                break
            share = (room - len(fitting)) / max(1, high_tokens - len(fitting))
            middle = min(max(low + int((high - low) * share), low + 1), high - 1)
            ids = self._prompt(exchange, middle)
            if len(ids) <= room:
                low, fitting = middle, ids
            else:
                high, high_tokens = middle, len(ids)
        return fitting, whole - low

    def _prompt(self, exchange: Exchange, characters: int) -> list[int]:
        prompt = exchange.prompt(characters)
        if not self._chat:
            return [*self._start, *self._plain(prompt)]
        asked = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text; a word that looks like a special token is read as any other."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return encoded["input_ids"]


def sequences(examples: Sequence[Example], packs: Iterable[Sequence[int]] | None = None) -> TokenSet:
    """Return examples as the rows of one split, each alone or several concatenated.

    Roles of tokens (:class:`TokenRole`) are in ``extra``. A row's label is its number of examples.

    Args:
        examples: One at least.
        packs: The examples of each row; None: each alone.
    """
    rows = [[example] for example in examples] if packs is None else [[examples[one] for one in row] for row in packs]
    lengths = [sum(len(example.ids) for example in row) for row in rows]
    starts_R = torch.zeros(len(rows) + 1, dtype=torch.int64)
    starts_R[1:] = torch.tensor(lengths).cumsum(0)
    return TokenSet(
        ids_T=torch.tensor([one for row in rows for example in row for one in example.ids], dtype=torch.int32),
        types_T=None,
        starts_R=starts_R,
        labels_R=torch.tensor([[len(row)] for row in rows], dtype=torch.int64),
        row_ids=tuple(", ".join(example.name for example in row) for row in rows),
        extra={
            ROLES: torch.tensor([one for row in rows for example in row for one in _roles(example)]).to(torch.uint8)
        },
    )


def _roles(example: Example) -> list[int]:
    answered = len(example.ids) - example.prompt_tokens
    asked = TokenRole.CRITERIA if example.part is PromptPart.CRITERIA else TokenRole(0)
    roles = [asked] * example.prompt_tokens + [asked | TokenRole.ANSWER] * answered
    roles[0] |= TokenRole.FIRST
    return [int(role) for role in roles]


def _chats(tokenizer: PreTrainedTokenizerBase, lm: LmSettings) -> bool:
    has = tokenizer.chat_template is not None
    if lm.chat == "on" and not has:
        raise ConfigError(
            'reading lm.chat = "on"', "the model's tokenizer has no chat template", '"auto" or "off" for this model'
        )
    return has and lm.chat != "off" and lm.format != "text"
