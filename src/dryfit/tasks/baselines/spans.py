"""Baselines of spans: never one, the whole text, its first sentence, or the one that a linear model likes best."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from dryfit.tasks.baselines.baseline import Baseline, Rows
from dryfit.tasks.baselines.words import train_words
from dryfit.tasks.rows.characters import Trimmer, space_flags, word_spans
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION, Row, Splits
from dryfit.tasks.spans.span_answers import scored_spans
from dryfit.tasks.tokens.windows import Ragged, Spans

_ENDS: Final = ".!?\\n\u3002\uff01\uff1f"
_SENTENCE: Final = re.compile(f"[^{_ENDS}]+[{_ENDS}]*")
_TRUE_FROM: Final = 0.5
_NONE: Final = (0, 0)


def span_baselines(splits: Splits, golds: Mapping[str, Spans]) -> Iterator[Baseline]:
    """Yield the baselines of spans.

    Args:
        splits: The rows of train and validation.
        golds: The right spans of each row, by its id, without those of white space alone.
    """
    rows = splits[VALIDATION]
    for name, words, pick in (
        ("never", "never a span", lambda _: _NONE),
        ("whole", "always the whole text", _whole),
        ("first", "always the first sentence", lambda text: sentences(text)[0]),
    ):
        yield Baseline(name, words, partial(_scored, rows, golds, [pick(row.text) for row in rows]))
    for name, how, balanced in (("tfidf", "", False), ("tfidf-balanced", ", sentences weighed alike", True)):
        words = f"the likeliest sentence, or none, by TF-IDF of its words and logistic regression{how}"
        yield Baseline(name, words, partial(_by_words, splits, golds, balanced), is_linear=True)


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the sentences of a text, [start, end) each; the whole text where it has none, (0, 0) of white space."""
    found = _trimmed(text, [match.span() for match in _SENTENCE.finditer(text)])
    return [span for span in found if span != _NONE] or [_whole(text)]


def _whole(text: str) -> tuple[int, int]:
    return _trimmed(text, [(0, len(text))])[0]


def _trimmed(text: str, spans: Spans) -> list[tuple[int, int]]:
    """Return spans without white space at their ends, as rows of the data are read."""
    trimmed_N2 = Trimmer.of(space_flags(text)).trimmed(np.array(spans, dtype=np.int32).reshape(-1, 2))
    return [(start, end) for start, end in trimmed_N2.tolist()]


def _scored(rows: Sequence[Row], golds: Mapping[str, Spans], answers: Spans) -> Rows:
    gold = Ragged.of([np.array(_trimmed(row.text, golds[row.id]), dtype=np.int32).reshape(-1, 2) for row in rows])
    words = Ragged.of([word_spans(row.text) for row in rows])
    return list(scored_spans([row.id for row in rows], np.array(answers, dtype=np.int64), gold, words))


def _by_words(splits: Splits, golds: Mapping[str, Spans], balanced: bool) -> Rows:
    """Answer with the likeliest sentence of each row; a sentence is right that shares a character with a span."""
    asked: list[tuple[str | None, str]] = []
    has: list[bool] = []
    for row in splits[TRAIN]:
        for start, end in sentences(row.text):
            asked.append((row.criterion, row.text[start:end]))
            has.append(any(start < last and first < end for first, last in golds[row.id]))
    predict = train_words(asked, np.array(has, dtype=np.float64)[:, None], balanced=balanced)
    found = [(row, span) for row in splits[VALIDATION] for span in sentences(row.text)]
    p_N = predict([(row.criterion, row.text[start:end]) for row, (start, end) in found])[:, 0]
    best: dict[str, tuple[float, tuple[int, int]]] = {}
    for (row, span), p in zip(found, p_N.tolist(), strict=True):
        if p >= _TRUE_FROM and p > best.get(row.id, (0.0, span))[0]:
            best[row.id] = (p, span)
    return _scored(splits[VALIDATION], golds, [best.get(row.id, (0.0, _NONE))[1] for row in splits[VALIDATION]])
