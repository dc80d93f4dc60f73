"""Metrics of spans over the rows of a split. docs/settings.md defines each.

Dimension suffixes: ``R`` rows, ``N`` gold spans or words of all rows, ``2`` start and end.
"""

import math
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from dryfit.core.settings.choices import Metric
from dryfit.core.settings.task_facts import MetricName
from dryfit.tasks.spans.span_decoding import Floats, Ints, span_iou
from dryfit.tasks.tokens.windows import Ragged

_ROW: Final = 1 << 32
"""Longer than any text: row * _ROW + character orders the characters of all rows."""


@final
@dataclass(frozen=True, slots=True)
class RowScores:
    """Agreement of each row's answer with its best-matching gold span; 1 where both are none, 0 where one is.

    Attributes:
        exact_R: 1 for an exact match.
        f1_R: F1 of the words.
        iou_R: Intersection over union of the characters.
    """

    exact_R: Floats
    f1_R: Floats
    iou_R: Floats

    def by(self, metric: MetricName | None) -> Floats:
        """Return the values whose mean is the metric; the F1 of words for any other metric, and for None."""
        match metric:
            case Metric.EXACT_MATCH:
                return self.exact_R
            case Metric.SPAN_IOU:
                return self.iou_R
            case _:
                return self.f1_R


def row_weights(metric: MetricName | None, golds: Ragged) -> Floats:
    """Return the weight of each row in the mean that a metric is; they add up to the number of rows.

    All are 1 but for ``span_balanced``, of which the rows with evidence are one half and those without the other;
    where there are only rows of one kind, they are the whole.

    Args:
        metric: Its name; None: ``token_f1``.
        golds: Gold spans of each row.
    """
    has_R = golds.counts_R.numpy() > 0
    weights_R = np.ones(len(has_R))
    if metric == Metric.SPAN_BALANCED and 0 < has_R.sum() < len(has_R):
        weights_R[has_R] = len(has_R) / (2 * has_R.sum())
        weights_R[~has_R] = len(has_R) / (2 * (~has_R).sum())
    return weights_R


def row_scores(answers_R2: Ints, golds: Ragged, words: Ragged) -> RowScores:
    """Score one answer of each row.

    F1 is that of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), but words are compared by position, not by
    their letters: the right word at the wrong place does not count. A word that a span touches in part counts.

    Args:
        answers_R2: Characters of each answer; (0, 0) for none.
        golds: Gold spans of each row.
        words: Words of each row.
    """
    rows_N = np.repeat(np.arange(len(golds)), golds.counts_R.numpy())
    golds_N2 = golds.spans_N2.numpy().astype(np.int64)
    answers_N2 = answers_R2[rows_N]
    answered_N2 = _word_ranges(answers_N2, rows_N, words)
    wanted_N2 = _word_ranges(golds_N2, rows_N, words)
    shared_N = np.minimum(answered_N2[:, 1], wanted_N2[:, 1]) - np.maximum(answered_N2[:, 0], wanted_N2[:, 0])
    total_N = (answered_N2[:, 1] - answered_N2[:, 0]) + (wanted_N2[:, 1] - wanted_N2[:, 0])
    both_none_R = (golds.counts_R.numpy() == 0) & (answers_R2[:, 1] == 0)

    def best(values_N: Floats) -> Floats:
        best_R = both_none_R.astype(np.float64)
        np.maximum.at(best_R, rows_N, values_N)
        return best_R

    return RowScores(
        exact_R=best((answers_N2 == golds_N2).all(axis=1).astype(np.float64)),
        f1_R=best(2 * np.maximum(shared_N, 0) / np.maximum(total_N, 1)),
        iou_R=best(span_iou(answers_N2, golds_N2)),
    )


def span_metrics(answers_R2: Ints, golds: Ragged, words: Ragged) -> dict[str, float]:
    """Return the metrics of a split's answers.

    ``null_precision`` is 0 where no row is answered with none; ``null_recall`` is undefined (NaN) where every row has
    evidence, ``token_f1_has`` where none has, and ``span_balanced``, their mean, is then the other one.

    Args:
        answers_R2: Characters of each answer; (0, 0) for none.
        golds: Gold spans of each row.
        words: Words of each row.
    """
    scores = row_scores(answers_R2, golds, words)
    has_R = golds.counts_R.numpy() > 0
    said_none_R = answers_R2[:, 1] == 0
    both = (said_none_R & ~has_R).sum()
    weights_R = row_weights(Metric.SPAN_BALANCED, golds)
    return {
        "span_balanced": float((scores.f1_R * weights_R).mean()),
        "token_f1": float(scores.f1_R.mean()),
        "exact_match": float(scores.exact_R.mean()),
        "span_iou": float(scores.iou_R.mean()),
        "token_f1_has": float(scores.f1_R[has_R].mean()) if has_R.any() else math.nan,
        "null_precision": float(both / max(1, said_none_R.sum())),
        "null_recall": math.nan if has_R.all() else float(both / (~has_R).sum()),
    }


def _word_ranges(spans_N2: Ints, rows_N: Ints, words: Ragged) -> Ints:
    """Return the range of words that each span touches: the first, and one after the last."""
    of_N = np.repeat(np.arange(len(words)), words.counts_R.numpy())
    keys_N2 = words.spans_N2.numpy().astype(np.int64) + of_N[:, None] * _ROW
    asked_N2 = spans_N2 + rows_N[:, None] * _ROW
    first_N = np.searchsorted(keys_N2[:, 1], asked_N2[:, 0], side="right")
    last_N = np.searchsorted(keys_N2[:, 0], asked_N2[:, 1], side="left")
    return np.stack([first_N, last_N], axis=1)
