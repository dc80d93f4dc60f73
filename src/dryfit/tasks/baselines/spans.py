"""Baselines of spans: never one, the whole text, its first sentence, or the one that a linear model likes best."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from dryfit.core.settings.task_facts import MetricName
from dryfit.tasks.baselines.baseline import Baseline, Rows
from dryfit.tasks.baselines.words import train_words
from dryfit.tasks.rows.characters import Trimmer, space_flags, word_spans
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION, Row, Splits
from dryfit.tasks.spans.span_answers import null_threshold, scored_spans
from dryfit.tasks.spans.span_decoding import Floats, Ints
from dryfit.tasks.tokens.windows import Ragged, Spans

_ENDS: Final = ".!?\\n\u3002\uff01\uff1f"
_SENTENCE: Final = re.compile(f"[^{_ENDS}]+[{_ENDS}]*")
_TRUE_FROM: Final = 0.5
_NONE: Final = (0, 0)


def span_baselines(
    splits: Splits, golds: Mapping[str, Spans], *, fits: bool = False, metric: MetricName | None = None
) -> Iterator[Baseline]:
    """Yield the baselines of spans.

    Args:
        splits: The rows of train and validation.
        golds: The right spans of each row, by its id, without those of white space alone.
        fits: A linear model's threshold of none is fitted on validation, as a trained model's is with
            ``null_policy = "calibrated"``; else a sentence is an answer from a probability of one half on.
        metric: The study's, by which it is fitted.
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
        answers = partial(_by_words, splits, golds, balanced, fits, metric)
        yield Baseline(name, words, answers, is_linear=True)


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


def _scored(rows: Sequence[Row], golds: Mapping[str, Spans], answers: Spans | Ints) -> Rows:
    names = [row.id for row in rows]
    return list(scored_spans(names, np.array(answers, dtype=np.int64), *_truths(rows, golds)))


def _truths(rows: Sequence[Row], golds: Mapping[str, Spans]) -> tuple[Ragged, Ragged]:
    """Return the right spans and the words of rows."""
    right = [np.array(_trimmed(row.text, golds[row.id]), dtype=np.int32).reshape(-1, 2) for row in rows]
    return Ragged.of(right), Ragged.of([word_spans(row.text) for row in rows])


def _by_words(
    splits: Splits, golds: Mapping[str, Spans], balanced: bool, fits: bool, metric: MetricName | None
) -> Rows:
    rows = splits[VALIDATION]
    found = likeliest_sentences(splits, golds, balanced=balanced)
    if not fits:
        return _scored(rows, golds, found.answers())
    best = null_threshold(found.spans_R2, found.differences_R, *_truths(rows, golds), metric=metric)
    return _scored(rows, golds, found.answers(best))


@dataclass(frozen=True, slots=True)
class LikeliestSentences:
    """The likeliest sentence of each row.

    Attributes:
        spans_R2: Its characters; (0, 0) in a row of white space.
        differences_R: One half minus its probability: above 0 it is likelier that the row has no span; ``inf`` in a row
            of white space.
    """

    spans_R2: Ints
    differences_R: Floats

    def answers(self, threshold: float = 0.0) -> Ints:
        """Return each row's sentence, (R, 2); (0, 0) for none, where the difference is above the threshold."""
        return np.where(self.differences_R[:, None] > threshold, 0, self.spans_R2)


def likeliest_sentences(splits: Splits, golds: Mapping[str, Spans], *, balanced: bool) -> LikeliestSentences:
    """Train a linear model on the sentences of train, and return the likeliest sentence of each row of validation.

    Args:
        splits: The rows of train and validation.
        golds: The right spans of each row of train: a sentence is right that shares a character with one.
        balanced: Weigh right and wrong sentences alike.
    """
    asked: list[tuple[str | None, str]] = []
    has: list[bool] = []
    for row in splits[TRAIN]:
        for start, end in sentences(row.text):
            asked.append((row.criterion, row.text[start:end]))
            has.append(any(start < last and first < end for first, last in golds[row.id]))
    predict = train_words(asked, np.array(has, dtype=np.float64)[:, None], balanced=balanced)
    rows = splits[VALIDATION]
    found = [(at, span) for at, row in enumerate(rows) for span in sentences(row.text)]
    p_N = predict([(rows[at].criterion, rows[at].text[start:end]) for at, (start, end) in found])[:, 0]
    best = LikeliestSentences(np.zeros((len(rows), 2), dtype=np.int64), np.full(len(rows), np.inf))
    for (at, span), p in zip(found, p_N.tolist(), strict=True):
        if span != _NONE and _TRUE_FROM - p < best.differences_R[at]:
            best.spans_R2[at], best.differences_R[at] = span, _TRUE_FROM - p
    return best
