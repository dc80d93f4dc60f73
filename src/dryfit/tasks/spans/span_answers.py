"""Answers from decoded spans: the fitted null threshold, metrics and predictions.

Dimension suffixes: ``R`` rows, ``K`` candidates of a row, ``2`` start and end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from dryfit.core.settings.choices import Metric
from dryfit.core.settings.tables import SpanSettings
from dryfit.core.settings.task_facts import MetricName
from dryfit.scoring.scored_row import SPAN, ScoredRow
from dryfit.tasks.rows.checked_rows import Readable
from dryfit.tasks.spans.span_decoding import Decoded, Floats, Ints, fit_threshold, rows_without
from dryfit.tasks.spans.span_metrics import row_scores, row_weights, span_metrics
from dryfit.tasks.tokens.windows import Ragged, Windows

NULL_THRESHOLD: Final = "null_threshold"
"""Name of the fitted threshold of ``null_policy = "calibrated"``."""


@final
@dataclass(frozen=True, slots=True)
class SpanAnswers:
    """Spans of rows.

    Attributes:
        decoded: The best spans of each row.
        windows: Of these rows, with their gold spans and words.
        settings: The ``[span]`` table.
        metric: The study's metric, by which the threshold is chosen; None: by ``token_f1``.
    """

    decoded: Decoded
    windows: Windows
    settings: SpanSettings
    metric: MetricName | None = None

    def fit(self) -> Mapping[str, float]:
        """Return :func:`null_threshold` of these rows, with ``null_policy = "calibrated"``."""
        if self.settings.null_policy != "calibrated":
            return {}
        answers = self.decoded.spans_RK2[:, 0], self.decoded.differences_R
        return {NULL_THRESHOLD: null_threshold(*answers, self.windows.golds, self.windows.words, metric=self.metric)}

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the answers."""
        answers_R2 = self.decoded.answers(rows_without(self.decoded, self.settings, fitted.get(NULL_THRESHOLD, 0.0)))
        return span_metrics(answers_R2, self.windows.golds, self.windows.words)

    def scored_rows(self, ids: Sequence[str], fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row with its span, or none, beside the right ones, and how well they agree."""
        answers_R2 = self.decoded.answers(rows_without(self.decoded, self.settings, fitted.get(NULL_THRESHOLD, 0.0)))
        yield from scored_spans(ids, answers_R2, self.windows.golds, self.windows.words)

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield the span with its text and score, or none, with null's score and all candidates."""
        without_R = rows_without(self.decoded, self.settings, fitted.get(NULL_THRESHOLD, 0.0))
        for row, one in enumerate(rows):
            yield _prediction(self.decoded, row, one.text, without=bool(without_R[row]))


def null_threshold(
    spans_R2: Ints, differences_R: Floats, golds: Ragged, words: Ragged, *, metric: MetricName | None
) -> float:
    """Return the threshold of ``null_policy = "calibrated"``: the best of these rows by the study's metric.

    Metrics other than means over rows (``exact_match``, ``span_iou``, ``span_balanced``, whose rows have weights) are
    replaced by ``token_f1``: most of them do not depend on the threshold, and the best by ``null_recall``,
    ``null_precision`` or ``token_f1_has`` alone would answer nearly all rows with none, or nearly none.

    Args:
        spans_R2: The best span of each row.
        differences_R: How much better none is than that span; ``inf`` where there is no span.
        golds: The right spans.
        words: Words of each row.
        metric: The study's; None: ``token_f1``.
    """
    weights_R = row_weights(metric, golds)
    with_span, without = (
        row_scores(answers_R2, golds, words).by(metric) * weights_R
        for answers_R2 in (spans_R2, np.zeros_like(spans_R2))
    )
    return fit_threshold(differences_R, with_span, without)


def scored_spans(ids: Sequence[str], answers_R2: Ints, golds: Ragged, words: Ragged) -> Iterator[ScoredRow]:
    """Yield rows with answers beside their gold spans; see :func:`~dryfit.tasks.spans.span_metrics.row_scores`."""
    scores = row_scores(answers_R2, golds, words)
    spans_N2 = golds.spans_N2.tolist()
    ends = np.cumsum(golds.counts_R.numpy()).tolist()
    for row, (name, answer) in enumerate(zip(ids, answers_R2.tolist(), strict=True)):
        truth = spans_N2[ends[row] - int(golds.counts_R[row]) : ends[row]]
        values: dict[str, float] = {
            Metric.TOKEN_F1: float(scores.f1_R[row]),
            Metric.EXACT_MATCH: float(scores.exact_R[row]),
            Metric.SPAN_IOU: float(scores.iou_R[row]),
        }
        yield ScoredRow(name, {SPAN: truth}, {SPAN: answer if answer[1] > 0 else None}, values=values)


def _prediction(decoded: Decoded, row: int, text: str, *, without: bool) -> dict[str, object]:
    """Return the prediction of a row's span.

    Args:
        decoded: The candidates of all rows.
        row: Which row.
        text: Its text.
        without: Whether it is answered with no span.
    """
    candidates = [
        {"span": [start, end], "score": score}
        for (start, end), score in zip(decoded.spans_RK2[row].tolist(), decoded.scores_RK[row].tolist(), strict=True)
        if end > 0
    ]
    best: Mapping[str, object] = {"span": None, "text": None, "score": None}
    if candidates:
        start, end = decoded.spans_RK2[row, 0].tolist()
        best = {**candidates[0], "text": text[start:end]}
    return {
        "span": None if without else best["span"],
        "text": None if without else best["text"],
        "score": best["score"],
        "null_score": float(decoded.nulls_R[row]),
        "candidates": candidates,
    }
