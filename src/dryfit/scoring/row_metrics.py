"""Metrics of scored rows with a weight for each row: a trial's scores, where every row counts once, and intervals.

Dimension suffixes: ``R`` rows, ``C`` classes, ``S`` sums, ``B`` weightings of the rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dryfit.core.settings.choices import Metric
from dryfit.scoring.scored_row import CLASS, LOSS_TERMS, NUMBER, SPAN, ScoredRow

Floats = NDArray[np.float64]

CALIBRATION_BINS: Final = 15
"""Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599, section 5."""

_CORRELATIONS: Final = frozenset({Metric.PEARSON, Metric.SPEARMAN})
_MEANS: Final = frozenset({Metric.TOKEN_F1, Metric.EXACT_MATCH, Metric.SPAN_IOU})


@dataclass(frozen=True, slots=True)
class RowMetric:
    """A metric of a set of rows.

    Attributes:
        rows: How many rows.
        of: Returns its value for each weighting, (B, R) to (B,): how often each row counts.
    """

    rows: int
    of: Callable[[Floats], Floats]

    @property
    def value(self) -> float:
        """Its value where every row counts once."""
        return float(self.of(np.ones((1, self.rows)))[0])


def row_metric(name: str, rows: Sequence[ScoredRow]) -> RowMetric | None:
    """Return a metric of scored rows; None where the rows lack its inputs, as for a metric of the user's own."""
    if not rows:
        return None
    if name == Metric.COMBINED:
        parts = [row_metric(Metric.F1_MACRO, rows), row_metric(Metric.TOKEN_F1, rows)]
        known = [part for part in parts if part is not None]
        return RowMetric(len(rows), lambda w: (known[0].of(w) + known[1].of(w)) / 2) if len(known) == 2 else None
    if name == Metric.LOSS:
        return _loss(rows)
    if any(name in row.values for row in rows):
        return _mean([row.values.get(name, math.nan) for row in rows])
    if name in _SPAN_METRICS and all(SPAN in row.answer for row in rows):
        return _of_spans(name, rows)
    if name in _CORRELATIONS and all(NUMBER in row.answer for row in rows):
        return _of_numbers(name, rows)
    if all(row.p and CLASS in row.answer for row in rows):
        return _of_classes(name, rows)
    return None


def _mean(values: Sequence[float]) -> RowMetric:
    """Return the mean of those values that are known: of generated answers a sample is."""
    of_rows_R = np.array(values, dtype=np.float64)
    known_R = np.isfinite(of_rows_R).astype(np.float64)
    sums_R = np.where(known_R > 0, of_rows_R, 0.0)
    return RowMetric(len(values), lambda weights_BR: _quotient(weights_BR @ sums_R, weights_BR @ known_R))


def _loss(rows: Sequence[ScoredRow]) -> RowMetric | None:
    if not all(Metric.LOSS in row.values for row in rows):
        return None
    losses_R = np.array([row.values[Metric.LOSS] for row in rows])
    terms_R = np.array([row.values.get(LOSS_TERMS, 1.0) for row in rows])
    return RowMetric(len(rows), lambda weights_BR: _quotient(weights_BR @ losses_R, weights_BR @ terms_R))


def _of_numbers(name: str, rows: Sequence[ScoredRow]) -> RowMetric:
    right_R, said_R = (np.array([part[NUMBER] for part in parts], np.float64) for parts in both_parts(rows))
    return correlation(name, right_R, said_R)


def correlation(name: str, right_R: Floats, said_R: Floats) -> RowMetric:
    """Return a correlation of numbers; NaN where one of the two sides has the same number in all rows.

    Pearson's is that of the numbers, Spearman's that of their ranks, of equal ones the mean rank.
    """
    rows = len(right_R)
    if not np.isfinite(said_R).all() or not np.ptp(said_R) or not np.ptp(right_R):
        return RowMetric(rows, lambda w: np.full(len(w), math.nan))
    if name == Metric.PEARSON:
        return RowMetric(rows, lambda w: _correlation(w, right_R[None], said_R[None]))
    return RowMetric(rows, lambda w: _correlation(w, _ranks(w, right_R), _ranks(w, said_R)))


def _correlation(weights_BR: Floats, one_BR: Floats, other_BR: Floats) -> Floats:
    """Return Pearson's correlation, (B,)."""
    of_all_B1 = weights_BR.sum(axis=1, keepdims=True)
    one_BR, other_BR = (
        side_BR - _quotient((weights_BR * side_BR).sum(axis=1, keepdims=True), of_all_B1)
        for side_BR in (one_BR, other_BR)
    )
    spread_B = (weights_BR * one_BR**2).sum(axis=1) * (weights_BR * other_BR**2).sum(axis=1)
    return np.clip(_quotient((weights_BR * one_BR * other_BR).sum(axis=1), np.sqrt(spread_B)), -1, 1)


def _ranks(weights_BR: Floats, values_R: Floats) -> Floats:
    """Return the rank of each row, (B, R), of equal numbers the mean, where a row is there as often as it counts."""
    _, of_row_R = np.unique(values_R, return_inverse=True)
    counts_BU = np.zeros((len(weights_BR), int(of_row_R.max()) + 1))
    np.add.at(counts_BU.T, of_row_R, weights_BR.T)
    return (np.cumsum(counts_BU, axis=1) - counts_BU / 2)[:, of_row_R]


def _of_spans(name: str, rows: Sequence[ScoredRow]) -> RowMetric | None:
    none_R = np.array([not row.truth[SPAN] for row in rows], dtype=np.float64)
    said_none_R = np.array([row.answer[SPAN] is None for row in rows], dtype=np.float64)
    both_R = none_R * said_none_R
    if name == Metric.NULL_RECALL:
        return RowMetric(len(rows), lambda w: _quotient(w @ both_R, w @ none_R))
    if name == Metric.NULL_PRECISION:
        # 0 where nothing is answered with none, as in scikit-learn
        return RowMetric(len(rows), lambda w: np.nan_to_num(_quotient(w @ both_R, w @ said_none_R), nan=0.0))
    if not all(Metric.TOKEN_F1 in row.values for row in rows):
        return None
    has_R = 1.0 - none_R
    f1_R = np.array([row.values[Metric.TOKEN_F1] for row in rows]) * has_R
    if name == Metric.TOKEN_F1_HAS:
        return RowMetric(len(rows), lambda w: _quotient(w @ f1_R, w @ has_R))
    return RowMetric(len(rows), lambda w: _balanced(_quotient(w @ f1_R, w @ has_R), _quotient(w @ both_R, w @ none_R)))


def _balanced(has_B: Floats, none_B: Floats) -> Floats:
    """Return the mean of two metrics; where one is undefined, the other."""
    return np.where(np.isnan(has_B), none_B, np.where(np.isnan(none_B), has_B, (has_B + none_B) / 2))


_SPAN_METRICS: Final = frozenset({Metric.NULL_RECALL, Metric.NULL_PRECISION, Metric.TOKEN_F1_HAS, Metric.SPAN_BALANCED})


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of each class and weighting, (B, C): rows that have it, rows answered with it, rows that are both."""

    has: Floats
    said: Floats
    both: Floats

    @property
    def f1(self) -> Floats:
        return np.nan_to_num(_quotient(2 * self.both, self.has + self.said), nan=0.0)


def _of_classes(name: str, rows: Sequence[ScoredRow]) -> RowMetric | None:
    classes, several = len(rows[0].p), isinstance(rows[0].truth[CLASS], list)
    has_RC, said_RC = (one_hot([part[CLASS] for part in parts], classes) for parts in both_parts(rows))
    return class_metric(name, has_RC, said_RC, np.array([row.p for row in rows], dtype=np.float64), several=several)


def class_metric(name: str, has_RC: Floats, said_RC: Floats, p_RC: Floats, *, several: bool) -> RowMetric | None:
    """Return a metric of classes; None where it is no metric of these.

    Args:
        name: The metric.
        has_RC: 1 where a row has a class.
        said_RC: 1 where a class is a row's answer.
        p_RC: Probability of each class; where one is no number, what rests on them is none.
        several: A row may have several classes.
    """
    rows, classes = has_RC.shape
    both_RC = has_RC * said_RC

    def counts(weights_BR: Floats) -> _Counts:
        return _Counts(weights_BR @ has_RC, weights_BR @ said_RC, weights_BR @ both_RC)

    match name:
        case Metric.ACCURACY:
            return _mean((has_RC == said_RC).all(axis=1).tolist())
        case Metric.F1_MACRO:
            return RowMetric(rows, lambda w: counts(w).f1.mean(axis=1))
        case Metric.F1 if classes == 2 and not several:
            return RowMetric(rows, lambda w: counts(w).f1[:, 1])
        case Metric.BALANCED_ACCURACY if not several:
            return RowMetric(rows, lambda w: _balanced_accuracy(counts(w)))
        case Metric.MCC if not several:
            return RowMetric(rows, lambda w: _matthews(counts(w)))
        case Metric.ECE | Metric.AUROC if not np.isfinite(p_RC).all():
            return RowMetric(rows, lambda w: np.full(len(w), math.nan))
        case Metric.ECE:
            return _calibration(p_RC, has_RC, several=several)
        case Metric.AUROC:
            # Of two classes one says all: the other's ranking is the same, turned round.
            asked = range(1, 2) if classes == 2 and not several else range(classes)
            return RowMetric(rows, partial(_auroc, p_RC=p_RC, has_RC=has_RC, asked=asked))
        case _:
            return None


def both_parts(rows: Sequence[ScoredRow]) -> tuple[list[Any], list[Any]]:
    """Return the right answers of rows, and the given ones."""
    return [row.truth for row in rows], [row.answer for row in rows]


def one_hot(labels: Sequence[Any], classes: int) -> Floats:
    """Return labels, each a class or the list of several, as (R, C): 1 where a row has a class."""
    has_RC = np.zeros((len(labels), classes))
    for row, label in enumerate(labels):
        has_RC[row, label] = 1.0  # one class, or a list of them
    return has_RC


def _balanced_accuracy(counts: _Counts) -> Floats:
    recall_BC = _quotient(counts.both, counts.has)
    return _quotient(np.nansum(recall_BC, axis=1), (counts.has > 0).sum(axis=1).astype(np.float64))


def _matthews(counts: _Counts) -> Floats:
    """Return the correlation of Gorodkin 2004 (Comput. Biol. Chem. 28(5-6)); 0 where one side has a single class."""
    rows_B = counts.has.sum(axis=1)
    shared_B = counts.both.sum(axis=1) * rows_B - (counts.has * counts.said).sum(axis=1)
    spread_B = (rows_B**2 - (counts.said**2).sum(axis=1)) * (rows_B**2 - (counts.has**2).sum(axis=1))
    return np.nan_to_num(_quotient(shared_B, np.sqrt(np.maximum(spread_B, 0))), nan=0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """Probabilities that are judged by what came true: every class's, or of each row the likeliest class's.

    Attributes:
        p_RN: They themselves.
        true_RN: 1 where the row has the class.
        bins_RN: The bin that each lies in, from 1; the probability 1 is in one of its own, after the last.
    """

    p_RN: Floats
    true_RN: Floats
    bins_RN: NDArray[np.intp]


def judged(p_RC: Floats, has_RC: Floats, *, several: bool) -> Judged:
    """Return the probabilities that a calibration is judged by.

    Args:
        p_RC: Of each class.
        has_RC: 1 where a row has a class.
        several: A row may have several classes, so each class's probability is judged.
    """
    p_RN, true_RN = p_RC, has_RC
    if not several:
        likeliest_R1 = p_RC.argmax(axis=1)[:, None]
        p_RN, true_RN = (np.take_along_axis(of_RC, likeliest_R1, axis=1) for of_RC in (p_RC, has_RC))
    bins_RN = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1), p_RN.astype(np.float32), side="right")
    return Judged(p_RN, true_RN, bins_RN)


def _calibration(p_RC: Floats, has_RC: Floats, *, several: bool) -> RowMetric:
    """Return the expected calibration error: of every class's probability, or of the likeliest class's."""
    found = judged(p_RC, has_RC, several=several)
    rows, numbers = found.p_RN.shape
    gaps_RS = np.zeros((rows, CALIBRATION_BINS + 2))
    for column in range(numbers):
        gaps_R = found.true_RN[:, column] - found.p_RN[:, column]
        np.add.at(gaps_RS, (np.arange(rows), found.bins_RN[:, column]), gaps_R)
    return RowMetric(rows, lambda w: _quotient(np.abs(w @ gaps_RS).sum(axis=1), w.sum(axis=1) * numbers))


def _auroc(weights_BR: Floats, p_RC: Floats, has_RC: Floats, asked: range) -> Floats:
    """Return the mean AUROC of the classes that some of the rows have and some do not; NaN where there is none."""
    of_class_CB = np.array([_ranking(weights_BR, p_RC[:, one], has_RC[:, one]) for one in asked])
    known_CB = np.isfinite(of_class_CB)
    return _quotient(np.where(known_CB, of_class_CB, 0).sum(axis=0), known_CB.sum(axis=0).astype(np.float64))


def _ranking(weights_BR: Floats, p_R: Floats, has_R: Floats) -> Floats:
    """Return the share of (with, without) pairs that are ranked rightly; ties count half (Hanley and McNeil 1982)."""
    order = np.argsort(p_R, kind="stable")
    starts = np.flatnonzero(np.diff(p_R[order], prepend=-math.inf))
    with_BU = np.add.reduceat((weights_BR * has_R)[:, order], starts, axis=1)
    without_BU = np.add.reduceat((weights_BR * (1 - has_R))[:, order], starts, axis=1)
    below_BU = np.cumsum(without_BU, axis=1) - without_BU / 2
    return _quotient((with_BU * below_BU).sum(axis=1), with_BU.sum(axis=1) * without_BU.sum(axis=1))


def _quotient(above: Floats, below: Floats) -> Floats:
    """Return a quotient; NaN where the divisor is 0."""
    return np.divide(above, below, out=np.full(np.shape(above), math.nan), where=below != 0)
