"""Spans: their loss, decoding from the scores of windows, answers and metrics."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from dryfit.settings.choices import Metric
from dryfit.settings.tables import LossSettings, SpanSettings
from dryfit.settings.task_facts import MetricName
from dryfit.tasks.base import Batch
from dryfit.tasks.losses import focal
from dryfit.tasks.rows import Readable
from dryfit.tasks.scored_rows import SPAN, ScoredRow
from dryfit.tasks.windows import Ragged, Windows

# Decoding: from the scores of windows to one span of each row, or none.
#
# A model's outputs are packed on its device into a few numbers of each window; the rest is done on the host for a
# whole split at once. docs/tasks.md has the formulas.
#
# Dimension suffixes: ``B`` windows of a batch, ``L`` tokens, ``W`` windows of a split, ``R`` rows, ``N`` candidates
# of all rows, ``K`` candidates of a window or row, ``2`` start and end.


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FACTS: Final = 5
"""Columns before the candidates: null's start and end score, log normalisers of starts and ends, and the loss."""
_LOSS: Final = 4
_FIELDS: Final = 4
"""Columns of each candidate: first and last token, their scores."""
_ROUNDING: Final = 1e-5
"""Differences of scores that are closer than this share of their usual size are taken as equal: fp32 rounds."""
_ALONE: Final = 1.0
"""Distance of a threshold from the differences of all rows where these are equal."""
_LARGEST: Final = 1e30
"""Scores are clamped to this: a sum of two stays finite, and a broken model still decodes."""


def answerable(batch: Batch) -> torch.Tensor:
    """Return which tokens a span may begin or end with: those of the text, and the null position, (B, L)."""
    return (batch["text_mask"] != 0).scatter(1, batch["nulls"].unsqueeze(1), value=True)


def pack(outputs: torch.Tensor, batch: Batch, settings: SpanSettings) -> torch.Tensor:
    """Pack what decoding needs of windows: their best candidates, null's scores and log normalisers.

    Candidates are all pairs of the ``topk`` best starts and ends, with the end not before the start and at most
    ``max_answer_len`` tokens; the ``topk`` best pairs stay.

    Args:
        outputs: Scores of each token as a start and as an end, (B, L, 2).
        batch: ``text_mask`` (B, L), ``nulls`` (B) and, for the loss, ``labels`` (B, 2).
        settings: The ``[span]`` table.

    Returns:
        (B, 5 + 4 * ``topk``), fp32, on the device of the outputs.
    """
    text_BL = batch["text_mask"] != 0
    raw_BL2 = outputs.float()
    scores_BL2 = token_scores(outputs)
    excluded_BL = ~answerable(batch)
    logs_B2 = scores_BL2.masked_fill(excluded_BL.unsqueeze(-1), -math.inf).logsumexp(dim=1)
    nulls_B2 = _at(scores_BL2, batch["nulls"].unsqueeze(1).expand(-1, 2))
    text_scores_BL2 = scores_BL2.masked_fill(~text_BL.unsqueeze(-1), -math.inf)
    count = min(settings.topk, text_BL.shape[1])
    tops_BK2, places_BK2 = text_scores_BL2.topk(count, dim=1)
    sums_BKK = tops_BK2[:, :, None, 0] + tops_BK2[:, None, :, 1]
    tokens_BKK = places_BK2[:, None, :, 1] - places_BK2[:, :, None, 0] + 1
    sums_BKK = sums_BKK.masked_fill((tokens_BKK < 1) | (tokens_BKK > settings.max_answer_len), -math.inf)
    kept = min(settings.topk, count * count)
    best_BK, pairs_BK = sums_BKK.flatten(1).topk(kept, dim=1)
    starts_BK, ends_BK = pairs_BK // count, pairs_BK % count
    candidates = [places_BK2[..., 0].gather(1, starts_BK), places_BK2[..., 1].gather(1, ends_BK)]
    scores = [tops_BK2[..., 0].gather(1, starts_BK), tops_BK2[..., 1].gather(1, ends_BK)]
    # An invalid pair keeps no score: both its scores may be finite, with only the order or distance wrong.
    scores = [scores_BK.masked_fill(best_BK == -math.inf, -math.inf) for scores_BK in scores]
    kept_BK4 = torch.stack([*candidates, *scores], dim=-1).float()
    kept_BK4 = torch.nn.functional.pad(kept_BK4, (0, 0, 0, settings.topk - kept), value=-math.inf)
    losses_B = (logs_B2 - _at(raw_BL2, batch["labels"])).mean(dim=1)
    return torch.cat([nulls_B2, logs_B2, losses_B.unsqueeze(1), kept_BK4.flatten(1)], dim=1)


def token_scores(outputs: torch.Tensor) -> torch.Tensor:
    """Return the scores of each token as a start and as an end, finite and in fp32."""
    return outputs.float().nan_to_num(nan=-_LARGEST).clamp(-_LARGEST, _LARGEST)


def window_losses(packed_WK: torch.Tensor) -> torch.Tensor:
    """Return the plain cross entropy of each window, the mean of its start's and its end's, (W,)."""
    return packed_WK[:, _LOSS]


def _at(scores_BL2: torch.Tensor, places_B2: torch.Tensor) -> torch.Tensor:
    """Return the start score at the first place and the end score at the second, (B, 2)."""
    return scores_BL2.gather(1, places_B2.unsqueeze(1)).squeeze(1)


@final
@dataclass(frozen=True, slots=True)
class Decoded:
    """The best spans of each row, and how null (no span) compares with the best.

    Attributes:
        spans_RK2: Characters of the best spans of each row, the best first; (0, 0) where there are fewer.
        scores_RK: Their scores by the reranker; ``-inf`` where there are fewer.
        nulls_R: The score of no span at all.
        differences_R: ``nulls_R`` minus the best span's score; ``inf`` without any span.
        log_ratios_R: Log of the ratio of null's probability to the best span's; ``inf`` without any span.
    """

    spans_RK2: Ints
    scores_RK: Floats
    nulls_R: Floats
    differences_R: Floats
    log_ratios_R: Floats

    def answers(self, without_R: NDArray[np.bool_]) -> Ints:
        """Return one span of each row, (R, 2); (0, 0) for none.

        Args:
            without_R: Rows that are answered with none.
        """
        return np.where(without_R[:, None], 0, self.spans_RK2[:, 0])


def decode(packed_WK: torch.Tensor, windows: Windows, settings: SpanSettings) -> Decoded:
    """Merge the candidates of each row's windows into its best spans.

    The score of no span is the smallest of a row's windows: a window without the evidence rightly prefers none. So
    does ``run_qa`` of transformers (examples/pytorch/question-answering/
    utils_qa.py), after BERT's ``run_squad.py``.

    Args:
        packed_WK: :func:`pack` of each window, in order, on the CPU.
        windows: The windows.
        settings: The ``[span]`` table.
    """
    return ranked(*row_candidates(packed_WK, windows, normalised=settings.reranker == "product"), settings)


def row_candidates(packed_WK: torch.Tensor, windows: Windows, *, normalised: bool) -> tuple["Candidates", Floats]:
    """Return the candidates of all rows, and each row's score of no span, (R,).

    Args:
        packed_WK: :func:`pack` of each window, in order, on the CPU.
        windows: The windows.
        normalised: Return log probabilities, of the softmax over the window's text and its null position.
    """
    facts_WK = packed_WK.double().numpy()
    norms_W = facts_WK[:, 2] + facts_WK[:, 3] if normalised else np.zeros(len(facts_WK))
    nulls_R = np.full(len(windows.golds), np.inf)
    np.minimum.at(nulls_R, windows.rows_W.numpy(), facts_WK[:, 0] + facts_WK[:, 1] - norms_W)
    return _candidates(facts_WK, norms_W, windows), nulls_R


def ranked(candidates: "Candidates", nulls_R: Floats, settings: SpanSettings) -> Decoded:
    """Choose the best of each row's candidates.

    Args:
        candidates: Of all rows, each row's best first.
        nulls_R: The score of no span at all.
        settings: The ``[span]`` table.
    """
    spans_RK2, logs_RK = _suppressed(candidates, len(nulls_R), settings)
    best_R = logs_RK[:, 0]
    with np.errstate(over="ignore"):
        scores_RK, null_scores_R = _scores(logs_RK, nulls_R, settings)
    has_span_R = best_R > -np.inf
    best_scores_R = np.where(has_span_R, scores_RK[:, 0], 0)
    return Decoded(
        spans_RK2=spans_RK2,
        scores_RK=scores_RK,
        nulls_R=null_scores_R,
        differences_R=np.where(has_span_R, null_scores_R - best_scores_R, np.inf),
        log_ratios_R=nulls_R - best_R,
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Spans of all rows, each row's best first."""

    rows_N: Ints
    spans_N2: Ints
    logs_N: Floats

    @classmethod
    def of(cls, rows_N: Ints, spans_N2: Ints, logs_N: Floats) -> "Candidates":
        """Sort spans by row and score; of equals the one that begins, then the one that ends first comes first."""
        return cls(rows_N, spans_N2, logs_N).only(np.lexsort((spans_N2[:, 1], spans_N2[:, 0], -logs_N, rows_N)))

    def only(self, kept: NDArray[Any]) -> "Candidates":
        """Return some of them, by a mask or by indices."""
        return Candidates(self.rows_N[kept], self.spans_N2[kept], self.logs_N[kept])


def _candidates(facts_WK: Floats, norms_W: Floats, windows: Windows) -> Candidates:
    kept_WK4 = facts_WK[:, _FACTS:].reshape(len(facts_WK), -1, _FIELDS)
    valid_WK = kept_WK4[..., 2] > -np.inf
    windows_N, _ = np.nonzero(valid_WK)
    kept_N4 = kept_WK4[valid_WK]
    begins_N = windows.tokens.starts_R.numpy()[windows_N]
    offsets_T2 = windows.offsets_T2.numpy()
    spans_N2 = np.stack(
        [
            offsets_T2[begins_N + kept_N4[:, 0].astype(np.int64), 0],
            offsets_T2[begins_N + kept_N4[:, 1].astype(np.int64), 1],
        ],
        axis=1,
    ).astype(np.int64)
    logs_N = kept_N4[:, 2] + kept_N4[:, 3] - norms_W[windows_N]
    return Candidates.of(windows.rows_W.numpy()[windows_N], spans_N2, logs_N)


def _suppressed(candidates: Candidates, rows: int, settings: SpanSettings) -> tuple[Ints, Floats]:
    """Return spans and logs of each row's best ``topk`` candidates that overlap by less than ``nms_iou``.

    Greedy non-maximum suppression, all rows at once: the best of each is taken, and what overlaps it is dropped.
    """
    spans_RK2 = np.zeros((rows, settings.topk, 2), dtype=np.int64)
    logs_RK = np.full((rows, settings.topk), -np.inf)
    for rank in range(settings.topk):
        if len(candidates.rows_N) == 0:
            break
        first_N = np.concatenate([[True], candidates.rows_N[1:] != candidates.rows_N[:-1]])
        best = candidates.only(first_N)
        spans_RK2[best.rows_N, rank] = best.spans_N2
        logs_RK[best.rows_N, rank] = best.logs_N
        overlaps_N = span_iou(candidates.spans_N2, best.spans_N2[first_N.cumsum() - 1])
        candidates = candidates.only(overlaps_N < settings.nms_iou)
    return spans_RK2, logs_RK


def _scores(logs_RK: Floats, nulls_R: Floats, settings: SpanSettings) -> tuple[Floats, Floats]:
    """Return the scores of spans and of null by the reranker."""
    match settings.reranker:
        case "sum":
            return logs_RK, nulls_R
        case "product":
            return np.exp(logs_RK), np.exp(nulls_R)
        case "softmax":
            all_RK = np.concatenate([nulls_R[:, None], logs_RK], axis=1)
            raised_RK = np.exp(all_RK - all_RK.max(axis=1, keepdims=True))
            shares_RK = raised_RK / raised_RK.sum(axis=1, keepdims=True)
            return shares_RK[:, 1:], shares_RK[:, 0]


def span_iou(first_N2: Ints, second_N2: Ints) -> Floats:
    """Return the intersection over union of the characters of two spans; 0 for empty ones."""
    shared_N = np.minimum(first_N2[:, 1], second_N2[:, 1]) - np.maximum(first_N2[:, 0], second_N2[:, 0])
    shared_N = np.maximum(shared_N, 0)
    either_N = (first_N2[:, 1] - first_N2[:, 0]) + (second_N2[:, 1] - second_N2[:, 0]) - shared_N
    return shared_N / np.maximum(either_N, 1)


def rows_without(decoded: Decoded, settings: SpanSettings, fitted: float | None) -> NDArray[np.bool_]:
    """Return which rows are answered with no span by the null policy, (R,); so is any row without candidates.

    Args:
        decoded: The candidates.
        settings: The ``[span]`` table.
        fitted: The threshold of :func:`fit_threshold`; read with ``null_policy = "calibrated"``.
    """
    match settings.null_policy:
        case "none":
            return decoded.differences_R == np.inf
        case "threshold":
            return decoded.differences_R > settings.null_threshold
        case "ratio":
            return decoded.log_ratios_R > math.log(settings.null_ratio)
        case "calibrated":
            assert fitted is not None, "no threshold was fitted"
            return decoded.differences_R > fitted


def fit_threshold(differences_R: Floats, with_span_R: Floats, without_R: Floats) -> float:
    """Return the threshold with the best mean value: a row has no span where null is better by more than it.

    Every threshold that decides differently is tried, as in the sweep of SQuAD 2.0's ``evaluate-v2.0.py``. It lies
    in the middle between two differences, and at the ends as far away as differences usually do, so that rounding
    changes no decision on these rows; differences that only rounding may separate count as one. Of equally good
    thresholds the nearest to 0 is taken, then the smaller.

    Args:
        differences_R: Null's score minus the best span's.
        with_span_R: Value of each row if answered with its best span.
        without_R: Value of each row if answered with none.

    Returns:
        The threshold; 0 where no row has a candidate.
    """
    can_R = np.isfinite(differences_R)
    if not can_R.any():
        return 0.0
    order = np.argsort(differences_R[can_R], kind="stable")
    sorted_N = differences_R[can_R][order]
    gains_N = (with_span_R - without_R)[can_R][order].cumsum()
    gaps_N = np.diff(sorted_N)
    (apart,) = (gaps_N > _ROUNDING * np.median(np.abs(sorted_N))).nonzero()
    beyond = float(np.median(gaps_N[apart])) / 2 if len(apart) else _ALONE
    thresholds = np.array([sorted_N[0] - beyond, *(sorted_N[apart] + gaps_N[apart] / 2), sorted_N[-1] + beyond])
    # Sums of the same values in another order differ in their last digits: rounded, equally good ones are equal.
    gains = np.array([0.0, *gains_N[apart], gains_N[-1]]).round(9)
    best = thresholds[gains == gains.max()]
    return float(min(best, key=lambda threshold: (abs(threshold), threshold)))


# The loss of spans: the start and the end are each classified among the tokens that they may be.
#
# Dimension suffixes: ``B`` windows of a batch, ``L`` tokens, ``2`` start and end.


@final
class SpanLoss:
    """Mean of the losses of a window's start and end; both are the null token in a window without a gold span.

    The softmax is over the text's tokens and the null token alone: padding, criterion and separators get no
    probability, also by label smoothing.

    Args:
        loss: The ``[loss]`` table.
    """

    def __init__(self, loss: LossSettings) -> None:
        self._loss = loss

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of windows, fp64."""
        labels_B2 = batch["labels"]
        return torch.full((), len(labels_B2), dtype=torch.float64, device=labels_B2.device)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss summed over windows; see :meth:`row_losses`."""
        return self.row_losses(outputs, batch).sum()

    def row_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss of each window, (B,).

        Args:
            outputs: Scores of each token as a start and as an end, (B, L, 2).
            batch: ``labels`` (B, 2), ``text_mask`` (B, L) and ``nulls`` (B).
        """
        valid_BL1 = answerable(batch).unsqueeze(-1)
        log_p_BL2 = outputs.masked_fill(~valid_BL1, -math.inf).log_softmax(dim=1)
        true_B2 = log_p_BL2.gather(1, batch["labels"].unsqueeze(1)).squeeze(1)
        if self._loss.name == "focal":
            return focal(true_B2, batch["labels"], self._loss).sum(dim=1) / 2
        smoothing = self._loss.label_smoothing
        if smoothing == 0:
            return -true_B2.sum(dim=1) / 2
        # Masked before the sum: 0 * -inf is NaN.
        mean_B2 = log_p_BL2.masked_fill(~valid_BL1, 0).sum(dim=1) / valid_BL1.sum(dim=1)
        return -((1 - smoothing) * true_B2 + smoothing * mean_B2).sum(dim=1) / 2


# Metrics of spans over the rows of a split. docs/settings.md defines each.
#
# Dimension suffixes: ``R`` rows, ``N`` gold spans or words of all rows, ``2`` start and end.


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


# Answers from decoded spans: the fitted null threshold, metrics and predictions.
#
# Dimension suffixes: ``R`` rows, ``K`` candidates of a row, ``2`` start and end.


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
    """Yield rows with answers beside their gold spans; see :func:`~dryfit.tasks.spans.row_scores`."""
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
