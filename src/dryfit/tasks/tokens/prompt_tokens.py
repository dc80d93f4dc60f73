"""Prompts and answers as token ids: the answer is never cut, the prompt's text is where both do not fit.

Prompt and answer are tokenised each for itself, so that what is learned is what is generated after the prompt.

Dimension suffixes: ``T`` all tokens of a split one after another, ``R`` examples: prompts with their answers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Final, final

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.core.errors import ConfigError, DataError
from dryfit.core.settings.tables import LmSettings
from dryfit.tasks.rows.prompts import Exchange, PromptPart
from dryfit.tasks.tokens.token_set import TokenSet

ROLES: Final = "roles"
"""What each token of a split is: its entry of ``TokenSet.extra``, uint8."""


class TokenRole(IntFlag):
    """What a token is."""

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
        prompt_tokens: How many of them are the prompt's.
        part: What is asked for.
        cut: Characters of the text that had no room.
    """

    name: str
    ids: tuple[int, ...]
    prompt_tokens: int
    part: PromptPart
    cut: int = 0


@final
class PromptTokenizer:
    """Makes examples of exchanges.

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
        self._tokenizer: Any = tokenizer  # its annotations leave open what is given back
        self._chat = _chats(tokenizer, lm)
        self._max_length = max_length
        alone = tokenizer("", add_special_tokens=True)["input_ids"]
        begin = tokenizer.bos_token_id
        self._start = [begin] if isinstance(begin, int) and alone[:1] == [begin] else []

    def examples(self, exchanges: Iterable[Exchange]) -> Iterator[Example]:
        """One example of each exchange; of one without a prompt as many as its text needs.

        Raises:
            DataError: An answer, or a prompt without its text, has no room.
        """
        for exchange in exchanges:
            if exchange.template is None:
                yield from self._pieces(exchange)
            else:
                yield self._asked(exchange)

    def question(self, exchange: Exchange, *, room: int) -> tuple[list[int], int]:
        """The ids of a prompt that is to be answered, and how many characters of its text had no room.

        Args:
            exchange: Its answer is not looked at.
            room: Tokens that are kept free for the answer.

        Raises:
            DataError: The prompt has no room even without its text.
        """
        return self._cut_to(exchange, self._max_length - room, f"{room} tokens are kept for the answer")

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of an answer's ids, without the token that ends it."""
        kept = [one for one in ids if one != self.end_id]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _asked(self, exchange: Exchange) -> Example:
        answer = [*self._plain(exchange.answer), self.end_id]
        prompt, cut = self._cut_to(exchange, self._max_length - len(answer), f"the answer has {len(answer)} tokens")
        return Example(exchange.name, (*prompt, *answer), len(prompt), exchange.part, cut)

    def _pieces(self, exchange: Exchange) -> Iterator[Example]:
        """A text as it is; what is too long for one example goes on in the next."""
        ids = [*self._plain(exchange.answer), self.end_id]
        room = self._max_length - len(self._start)
        for number, first in enumerate(range(0, len(ids), room)):
            name = f"{exchange.name} (piece {number + 1})" if len(ids) > room else exchange.name
            yield Example(name, (*self._start, *ids[first : first + room]), len(self._start), exchange.part)

    def _cut_to(self, exchange: Exchange, room: int, why: str) -> tuple[list[int], int]:
        """The longest prompt found that has room: its text is cut at its end.

        How many tokens a text takes is about linear in its characters, so the next cut is guessed from the last two.
        """
        whole = len(exchange.text)
        ids = self._prompt(exchange, whole)
        if len(ids) <= room:
            return ids, 0
        high, high_tokens = whole, len(ids)
        low, found = 0, self._prompt(exchange, 0)
        if len(found) > room:
            raise DataError(
                f"tokenising {exchange.place}",
                f"its prompt has {len(found)} tokens without its text, and {why}",
                allowed=f"{self._max_length} tokens together (train.max_length)",
                hint="raise train.max_length, or shorten the criterion, the prompt or the answer",
            )
        for _ in range(_MOST_CUTS):
            if high - low <= 1 or room - len(found) <= _FEW_SPARE:
                break
            share = (room - len(found)) / max(1, high_tokens - len(found))
            middle = min(max(low + int((high - low) * share), low + 1), high - 1)
            ids = self._prompt(exchange, middle)
            if len(ids) <= room:
                low, found = middle, ids
            else:
                high, high_tokens = middle, len(ids)
        return found, whole - low

    def _prompt(self, exchange: Exchange, characters: int) -> list[int]:
        prompt = exchange.prompt(characters)
        if not self._chat:
            return [*self._start, *self._plain(prompt)]
        asked = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _plain(self, text: str) -> list[int]:
        """Its ids; a word in it that looks like a special token is read as any other."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return encoded["input_ids"]


def sequences(examples: Sequence[Example], packs: Iterable[Sequence[int]] | None = None) -> TokenSet:
    """Examples as the rows of one split, each alone or several one behind the other.

    What each token is stands in ``extra`` (:class:`TokenRole`). A row's label says how many examples it has.

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
