"""Positions of white space, words and untokenised characters of a text, for spans without the text itself.

Dimension suffixes: ``N`` characters, ``T`` tokens, ``W`` words.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Positions = NDArray[np.int32]

# The white space of str.isspace; Unicode has none above.
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)
# Scripts that write no spaces between words: ideographs (the blocks of BERT's BasicTokenizer), and kana.
_ONE_BY_ONE = (
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


def space_flags(text: str) -> Flags:
    """Return which characters are white space, (N,)."""
    return np.isin(_codes(text), _SPACES)


def word_spans(text: str) -> Positions:
    """Return the words of a text: runs without white space; each ideograph and kana is a word.

    Returns:
        Start and end of each, (W, 2).
    """
    codes_N = _codes(text)
    if len(codes_N) == 0:
        return np.zeros((0, 2), dtype=np.int32)
    text_N = ~np.isin(codes_N, _SPACES)
    alone_N = np.zeros_like(text_N)
    for first, last in _ONE_BY_ONE:
        alone_N |= (codes_N >= first) & (codes_N <= last)
    # Between two characters of one word there is no edge.
    joined = text_N[:-1] & text_N[1:] & ~alone_N[:-1] & ~alone_N[1:]
    starts_W = np.flatnonzero(text_N & np.concatenate([[True], ~joined]))
    ends_W = np.flatnonzero(text_N & np.concatenate([~joined, [True]])) + 1
    return np.stack([starts_W, ends_W], axis=1).astype(np.int32)


def covered(characters: int, spans_T2: Positions) -> Flags:
    """Return which characters of a text are in any of some spans, (N,)."""
    edges_N = np.zeros(characters + 1, dtype=np.int64)
    np.add.at(edges_N, spans_T2[:, 0], 1)
    np.add.at(edges_N, spans_T2[:, 1], -1)
    return edges_N.cumsum()[:-1] > 0


@final
@dataclass(frozen=True, slots=True)
class Trimmer:
    """Trims white space from the ends of spans of one text.

    Attributes:
        next_N: First character at or after each position that is not white space; one more entry for the end.
        last_N: One after the last character before each position that is not white space.
    """

    next_N: Positions
    last_N: Positions

    @classmethod
    def of(cls, space_N: Flags) -> "Trimmer":
        """Make the trimmer of a text with this white space."""
        return cls(_next(~space_N), _after_last(~space_N))

    def trimmed(self, spans_T2: NDArray[Any]) -> Positions:
        """Return the spans without white space at their ends; (0, 0) where nothing is left.

        Args:
            spans_T2: Starts and ends, within the text.
        """
        starts_T, ends_T = self.next_N[spans_T2[:, 0]], self.last_N[spans_T2[:, 1]]
        return np.where((starts_T < ends_T)[:, None], np.stack([starts_T, ends_T], axis=1), 0).astype(np.int32)


@final
@dataclass(frozen=True, slots=True)
class Owners:
    """Assigns characters that tokenizers drop (accents, zero-width marks) to neighbouring tokens.

    Each belongs to the token right before it, or right after it at the beginning of a word: so the tokens of a word
    cover it, and a span of whole words is one of whole tokens.

    Attributes:
        starts_N: Extended start of a token by its own start; one more entry for the end.
        ends_N: The same for ends.
    """

    starts_N: Positions
    ends_N: Positions

    @classmethod
    def of(cls, space_N: Flags, tokens_T2: Positions) -> "Owners":
        """Assign the characters of a whole text.

        Args:
            space_N: Its white space.
            tokens_T2: All its tokens, trimmed; (0, 0) is none.
        """
        covered_N = covered(len(space_N), tokens_T2)
        stray_N = ~covered_N & ~space_N
        begins_N = _after_last(~stray_N)  # of the run of stray characters before each position
        # The run belongs to the token before it, if there is one.
        taken_N = np.concatenate([[False], covered_N])[begins_N]
        positions_N = np.arange(len(space_N) + 1, dtype=np.int32)
        return cls(np.where(taken_N, positions_N, begins_N), _next(~stray_N))

    def extended(self, tokens_T2: Positions) -> Positions:
        """Return tokens with the dropped characters that belong to them."""
        extended_T2 = np.stack([self.starts_N[tokens_T2[:, 0]], self.ends_N[tokens_T2[:, 1]]], axis=1)
        return np.where((tokens_T2[:, 0] < tokens_T2[:, 1])[:, None], extended_T2, 0).astype(np.int32)


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _next(flags_N: Flags) -> Positions:
    """Return the first set position at or after each one, or the end; one more entry than flags."""
    count = len(flags_N)
    positions = np.where(np.append(flags_N, True), np.arange(count + 1), count)
    return np.minimum.accumulate(positions[::-1])[::-1].astype(np.int32)


def _after_last(flags_N: Flags) -> Positions:
    """Return one after the last set position before each one, or 0; one more entry than flags."""
    positions = np.concatenate([[0], np.where(flags_N, np.arange(1, len(flags_N) + 1), 0)])
    return np.maximum.accumulate(positions).astype(np.int32)
