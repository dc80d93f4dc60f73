"""Long texts as overlapping windows, with the characters of each token and the gold span of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dryfit.settings.errors import ConfigError
from dryfit.tasks.rows import Readable
from dryfit.tasks.tokens import TokenSet, cls_is_last, numbers_segments

# Positions of white space, words and untokenised characters of a text, for spans without the text itself.
#
# Dimension suffixes: ``N`` characters, ``T`` tokens, ``W`` words.


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


# Dimension suffixes: ``T`` all tokens of a split one after another, ``L`` tokens of a window, ``W`` windows, ``R``
# rows, ``N`` spans or words of all rows, ``2`` start and end.


_CHUNK_ROWS = 100

Spans = Sequence[tuple[int, int]]
"""Starts and ends of characters of one text."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How texts are cut into windows.

    Attributes:
        max_length: Tokens of a window, the criterion and special tokens included.
        doc_stride: Tokens of the text that two neighbouring windows share.
    """

    max_length: int
    doc_stride: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """Spans of all rows, concatenated.

    Attributes:
        spans_N2: Characters [start, end), int32.
        counts_R: Number of spans of each row, int64.
    """

    spans_N2: torch.Tensor
    counts_R: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Positions]) -> "Ragged":
        """Concatenate the spans of rows, each (any, 2)."""
        counts_R = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(torch.from_numpy(np.concatenate([np.zeros((0, 2), dtype=np.int32), *rows])), counts_R)

    def __len__(self) -> int:
        return len(self.counts_R)


@final
@dataclass(frozen=True, slots=True)
class Windows:
    """One split, cut into windows.

    Attributes:
        tokens: The windows as rows of tokens. Their labels are the first and the last token of the gold span, (W, 2),
            within the window; both are its null position where no gold span lies wholly in it. The rest is in their
            ``extra``, and so cached with them.
    """

    tokens: TokenSet

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows_W(self) -> torch.Tensor:
        """Row of each window, int64, ascending; windows of a row are in the order of its text."""
        assert self.tokens.source_R is not None
        return self.tokens.source_R

    @property
    def offsets_T2(self) -> torch.Tensor:
        """Characters of each token in its text, int32; (0, 0) for other tokens and for white space."""
        return self.tokens.extra["offsets"]

    @property
    def nulls_W(self) -> torch.Tensor:
        """Position of the classification token in each window, int64."""
        return self.tokens.extra["nulls"]

    @property
    def golds(self) -> Ragged:
        """Gold spans of each row, without white space at their ends."""
        return Ragged(self.tokens.extra["golds"], self.tokens.extra["gold_counts"])

    @property
    def words(self) -> Ragged:
        """Words of each row."""
        return Ragged(self.tokens.extra["words"], self.tokens.extra["word_counts"])

    @property
    def has_span_W(self) -> torch.Tensor:
        """Which windows have a gold span."""
        return self.tokens.labels_R[:, 0] != self.nulls_W

    @property
    def unfit_R(self) -> torch.Tensor:
        """Which rows have gold spans of which none lies wholly in a window."""
        golds = self.golds
        fits_R = torch.zeros(len(golds), dtype=torch.bool)
        fits_R[self.rows_W[self.has_span_W]] = True
        return (golds.counts_R > 0) & ~fits_R


def extras(offsets_T2: torch.Tensor, nulls_W: torch.Tensor, golds: Ragged, words: Ragged) -> dict[str, torch.Tensor]:
    """Return the entries of ``TokenSet.extra`` that :class:`Windows` reads."""
    return {
        "offsets": offsets_T2,
        "nulls": nulls_W,
        "golds": golds.spans_N2,
        "gold_counts": golds.counts_R,
        "words": words.spans_N2,
        "word_counts": words.counts_R,
    }


def cut_into_windows(
    rows: Sequence[Readable], golds: Sequence[Spans], tokenizer: PreTrainedTokenizerBase, cut: Cut
) -> Windows:
    """Tokenise (criterion, text), or text alone, into windows that together hold every token of a text.

    Args:
        rows: At least one; all with a criterion, or none. No criterion fills a window alone.
        golds: Gold spans of each row, none of white space alone; a window learns the first that lies in it.
        tokenizer: The model's.
        cut: Length and overlap of windows.

    Raises:
        ConfigError: The tokenizer has no offsets, or puts no token before or after the text; or windows share so many
            tokens that the next one has nothing new.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            "cutting texts into windows",
            f"{type(tokenizer).__name__} does not say which characters a token stands for",
            allowed="a model with a fast tokenizer (a tokenizer.json)",
            hint="take another model, or task criteria",
        )
    _check_stride(rows, tokenizer, cut)
    parts = [_row_windows(row, spans, encoded) for row, spans, encoded in _encoded(rows, golds, tokenizer, cut)]
    ids_L = parts[0].windows[0].ids_L
    cls_last = cls_is_last(int(ids_L[0]), int(ids_L[-1]), tokenizer)
    windows = [window for part in parts for window in part.windows]
    nulls_W = np.array([len(window.ids_L) - 1 if cls_last else 0 for window in windows])
    for window, null in zip(windows, nulls_W, strict=True):
        _check_null(window, int(null), tokenizer)
    labels_W2 = np.array([window.gold or (null, null) for window, null in zip(windows, nulls_W, strict=True)])
    starts_W = torch.zeros(len(windows) + 1, dtype=torch.int64)
    starts_W[1:] = torch.tensor([len(window.ids_L) for window in windows]).cumsum(0)
    types = [window.types_L for window in windows if window.types_L is not None]
    return Windows(
        TokenSet(
            ids_T=torch.from_numpy(np.concatenate([window.ids_L for window in windows])),
            types_T=torch.from_numpy(np.concatenate(types)) if types else None,
            starts_R=starts_W,
            labels_R=torch.from_numpy(labels_W2),
            source_R=torch.repeat_interleave(torch.tensor([len(part.windows) for part in parts])),
            extra=extras(
                torch.from_numpy(np.concatenate([window.offsets_L2 for window in windows])),
                torch.from_numpy(nulls_W),
                Ragged.of([part.golds for part in parts]),
                Ragged.of([part.words for part in parts]),
            ),
        )
    )


@dataclass(frozen=True, slots=True)
class _Encoded:
    """One window as the tokenizer returns it; ``own_L``: which tokens are the text's."""

    ids_L: NDArray[np.int32]
    types_L: NDArray[np.uint8] | None
    offsets_L2: Positions
    own_L: Flags


@dataclass(frozen=True, slots=True)
class _Window:
    """One window; ``gold``: first and last token of its gold span, None where it has none."""

    ids_L: NDArray[np.int32]
    types_L: NDArray[np.uint8] | None
    offsets_L2: Positions
    gold: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _RowWindows:
    windows: list[_Window]
    golds: Positions
    words: Positions


def _encoded(
    rows: Sequence[Readable], golds: Sequence[Spans], tokenizer: PreTrainedTokenizerBase, cut: Cut
) -> Iterator[tuple[Readable, Spans, list[_Encoded]]]:
    """Yield each row with its gold spans and its windows."""
    options: dict[str, Any] = {
        "truncation": True if rows[0].criterion is None else "only_second",
        "max_length": cut.max_length,
        "stride": cut.doc_stride,
        "return_overflowing_tokens": True,
        "return_offsets_mapping": True,
        "return_attention_mask": False,
        "return_token_type_ids": numbers_segments(tokenizer),
    }
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        criteria = [row.criterion for row in chunk if row.criterion is not None]
        texts = [row.text for row in chunk]
        encoded: Any = tokenizer(criteria or texts, texts if criteria else None, **options)
        own = 1 if criteria else 0
        windows: list[list[_Encoded]] = [[] for _ in chunk]
        types = encoded.get("token_type_ids")
        for index, row in enumerate(encoded["overflow_to_sample_mapping"]):
            window = _Encoded(
                np.array(encoded["input_ids"][index], dtype=np.int32),
                np.array(types[index], dtype=np.uint8) if types is not None else None,
                np.array(encoded["offset_mapping"][index], dtype=np.int32),
                np.array([part == own for part in encoded.sequence_ids(index)]),
            )
            windows[row].append(window)
        yield from zip(chunk, golds[start : start + _CHUNK_ROWS], windows, strict=True)


def _row_windows(row: Readable, spans: Spans, encoded: Sequence[_Encoded]) -> _RowWindows:
    space_N = space_flags(row.text)
    trimmer = Trimmer.of(space_N)
    golds_N2 = trimmer.trimmed(np.array(spans, dtype=np.int32).reshape(-1, 2))
    own = [trimmer.trimmed(window.offsets_L2 * window.own_L[:, None]) for window in encoded]
    owners = Owners.of(space_N, np.concatenate(own))
    offsets = [owners.extended(tokens_L2) for tokens_L2 in own]
    # Characters that no token covers cannot be answered: a gold span is learned without them at its ends.
    reached_N2 = Trimmer.of(~covered(len(space_N), np.concatenate(offsets))).trimmed(golds_N2)
    windows: list[_Window] = []
    for window, offsets_L2 in zip(encoded, offsets, strict=True):
        inside = [(first, last) for first, last in covering_tokens(offsets_L2, reached_N2).tolist() if first >= 0]
        windows.append(_Window(window.ids_L, window.types_L, offsets_L2, inside[0] if inside else None))
    return _RowWindows(windows, golds_N2, word_spans(row.text))


def covering_tokens(offsets_L2: Positions, spans_N2: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first and last token of the shortest run that covers each span, (N, 2); -1 where none does.

    Several tokens may stand for one character (its bytes, or a word-boundary mark): all of them are taken.

    Args:
        offsets_L2: Characters of each token of a window; (0, 0) for tokens that are not the text's.
        spans_N2: Characters of each span; (0, 0) is none.
    """
    tokens_N2 = np.full((len(spans_N2), 2), -1, dtype=np.int64)
    (text,) = np.nonzero(offsets_L2[:, 0] < offsets_L2[:, 1])
    if len(text) == 0 or len(spans_N2) == 0:
        return tokens_N2
    starts, ends = offsets_L2[text].T
    lefts, first_of = np.unique(starts, return_index=True)
    rights, last_of = np.unique(ends[::-1], return_index=True)
    before_N = np.searchsorted(lefts, spans_N2[:, 0], side="right") - 1
    after_N = np.searchsorted(rights, spans_N2[:, 1], side="left")
    fits_N = (spans_N2[:, 0] < spans_N2[:, 1]) & (before_N >= 0) & (after_N < len(rights))
    first_N = first_of[before_N[fits_N]]
    last_N = len(ends) - 1 - last_of[after_N[fits_N]]
    for place in np.flatnonzero(first_N > last_N):  # tokens that overlap in part, each of which covers it
        both = range(last_N[place], first_N[place] + 1)
        first_N[place] = last_N[place] = min(both, key=lambda token: int(ends[token] - starts[token]))
    tokens_N2[fits_N] = np.stack([text[first_N], text[last_N]], axis=1)
    return tokens_N2


def _check_stride(rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase, cut: Cut) -> None:
    criteria = list(dict.fromkeys(row.criterion for row in rows if row.criterion is not None))
    room = cut.max_length - tokenizer.num_special_tokens_to_add(pair=bool(criteria))
    beside = ""
    if criteria:
        room -= max(map(len, tokenizer(criteria, add_special_tokens=False, verbose=False)["input_ids"]))
        beside = " beside the longest criterion"
    if cut.doc_stride >= room:
        raise ConfigError(
            "cutting texts into windows",
            f"span.doc_stride is {cut.doc_stride}, and a window with train.max_length = {cut.max_length} has room "
            f"for {room} tokens of a text{beside}",
            allowed=f"span.doc_stride of at most {room - 1}, so that each window has something new",
            hint="lower span.doc_stride or raise train.max_length",
        )


def _check_null(window: _Window, null: int, tokenizer: PreTrainedTokenizerBase) -> None:
    if window.offsets_L2[null].any():
        raise ConfigError(
            "cutting texts into windows",
            f"{type(tokenizer).__name__} puts no token before the text, which would stand for no span at all",
            allowed="an encoder's tokenizer, with a classification token, or rows with a criterion",
        )
