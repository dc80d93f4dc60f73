"""Spans that were decoded, as answers: a threshold of null fitted, metrics, and what is said of each row.

Dimension suffixes: ``R`` rows, ``K`` candidates of a row, ``2`` start and end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from dryfit.core.settings.tables import SpanSettings
from dryfit.core.settings.task_facts import MetricName
from dryfit.tasks.rows.checked_rows import Readable
from dryfit.tasks.spans.span_decoding import Decoded, fit_threshold, rows_without
from dryfit.tasks.spans.span_metrics import row_scores, span_metrics
from dryfit.tasks.tokens.windows import Windows

NULL_THRESHOLD: Final = "null_threshold"
"""What ``null_policy = "calibrated"`` fits."""


@final
@dataclass(frozen=True, slots=True)
class SpanAnswers:
    """What one model, or several, say of the spans of rows; an :class:`~dryfit.tasks.averaging.Answers`.

    Attributes:
        decoded: The best spans of each row.
        windows: Of these rows; their gold spans and words are read.
        settings: The ``[span]`` table.
        metric: The study's; None: nothing is chosen by it.
    """

    decoded: Decoded
    windows: Windows
    settings: SpanSettings
    metric: MetricName | None = None

    def fit(self) -> Mapping[str, float]:
        """The threshold of null that is the best by the study's metric, where it is asked for.

        By any but the means over all rows (``exact_match``, ``span_iou``) it is that with the best ``token_f1``: most
        others do not depend on it, and the best by ``null_recall``, ``null_precision`` or ``token_f1_has`` alone would
        answer nearly all rows with none, or nearly none.
        """
        if self.settings.null_policy != "calibrated":
            return {}
        spans_R2 = self.decoded.spans_RK2[:, 0]
        with_span, without = (
            row_scores(answers_R2, self.windows.golds, self.windows.words).by(self.metric)
            for answers_R2 in (spans_R2, np.zeros_like(spans_R2))
        )
        return {NULL_THRESHOLD: fit_threshold(self.decoded.differences_R, with_span, without)}

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """All metrics of the answers."""
        answers_R2 = self.decoded.answers(rows_without(self.decoded, self.settings, fitted.get(NULL_THRESHOLD, 0.0)))
        return span_metrics(answers_R2, self.windows.golds, self.windows.words)

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """The span with its text and score, or none; beside it null's score and all candidates."""
        without_R = rows_without(self.decoded, self.settings, fitted.get(NULL_THRESHOLD, 0.0))
        for row, one in enumerate(rows):
            yield _said(self.decoded, row, one.text, without=bool(without_R[row]))


def _said(decoded: Decoded, row: int, text: str, *, without: bool) -> dict[str, object]:
    """What a prediction says of a row's span.

    Args:
        decoded: The candidates of all rows.
        row: Which row.
        text: Its text.
        without: It shall have no span.
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
