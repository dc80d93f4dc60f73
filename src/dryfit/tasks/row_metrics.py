"""Metrics from scored rows, their confidence intervals, and models that answer every row the same."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dryfit.settings.choices import Metric
from dryfit.settings.text import brief
from dryfit.tasks.scored_rows import CLASS, LOSS_TERMS, NUMBER, SPAN, TEXT, RowFacts, ScoredRow, known_facts

# Metrics of scored rows with a weight for each row: a trial's scores, where every row counts once, and intervals.
#
# Dimension suffixes: ``R`` rows, ``C`` classes, ``S`` sums, ``B`` weightings of the rows.


Floats = NDArray[np.float64]

CALIBRATION_BINS: Final = 15
"""Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599, section 5."""

_CORRELATIONS: Final = frozenset({Metric.PEARSON, Metric.SPEARMAN})


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
class ClassCounts:
    """Of each class and weighting, (B, C): rows that have it, rows answered with it, rows that are both."""

    has: Floats
    said: Floats
    both: Floats

    @property
    def f1(self) -> Floats:
        """F1 of each class, (B, C); 0 where it is undefined."""
        return np.nan_to_num(_quotient(2 * self.both, self.has + self.said), nan=0.0)

    @property
    def balanced_accuracy(self) -> Floats:
        """Mean recall of the classes that some row has, (B,)."""
        recall_BC = _quotient(self.both, self.has)
        return _quotient(np.nansum(recall_BC, axis=1), (self.has > 0).sum(axis=1).astype(np.float64))

    @property
    def matthews(self) -> Floats:
        """Correlation of Gorodkin 2004 (Comput. Biol. Chem. 28(5-6)), (B,); 0 where one side has a single class."""
        rows_B = self.has.sum(axis=1)
        shared_B = self.both.sum(axis=1) * rows_B - (self.has * self.said).sum(axis=1)
        spread_B = (rows_B**2 - (self.said**2).sum(axis=1)) * (rows_B**2 - (self.has**2).sum(axis=1))
        return np.nan_to_num(_quotient(shared_B, np.sqrt(np.maximum(spread_B, 0))), nan=0.0)


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

    def counts(weights_BR: Floats) -> ClassCounts:
        return ClassCounts(weights_BR @ has_RC, weights_BR @ said_RC, weights_BR @ both_RC)

    match name:
        case Metric.ACCURACY:
            return _mean((has_RC == said_RC).all(axis=1).tolist())
        case Metric.F1_MACRO:
            return RowMetric(rows, lambda w: counts(w).f1.mean(axis=1))
        case Metric.F1 if classes == 2 and not several:
            return RowMetric(rows, lambda w: counts(w).f1[:, 1])
        case Metric.BALANCED_ACCURACY if not several:
            return RowMetric(rows, lambda w: counts(w).balanced_accuracy)
        case Metric.MCC if not several:
            return RowMetric(rows, lambda w: counts(w).matthews)
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


# Confidence intervals of metrics and of their differences, by a bootstrap over groups of rows.
#
# Rows of one group (a person's posts, a document's windows) are not independent: whole groups are drawn, with
# replacement, and the percentiles of what comes out are the interval (Efron and Tibshirani 1993, chapter 13; of
# clusters: Cameron, Gelbach and Miller 2008, Rev. Econ. Stat. 90(3)). Where configurations were trained with several
# seeds, seeds are drawn too, independently of the groups: every seed has every row, and so rows and seeds are crossed
# (the pigeonhole bootstrap of Owen 2007, Ann. Appl. Stat. 1(2), which is, if anything, a little wide).
#
# Dimension suffixes: ``R`` rows, ``G`` groups, ``B`` draws, ``S`` seeds.


DRAWS: Final = 2_000
"""Draws of groups: the ends of a 95 % interval then vary by about a twentieth of its width."""
LEVEL: Final = 0.95
_AT_ONCE: Final = 100
_FEWEST_GROUPS: Final = 5
"""With fewer groups a percentile of draws says nothing."""
_SEED_DRAWS: Final = 5_000
"""Draws of seeds and groups: corrected for many comparisons, an interval ends farther out, where draws are few."""
FEWEST_SEEDS: Final = 2
"""With one seed nothing says how much seeds differ."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval.

    Attributes:
        value: As computed from all rows.
        low: Its lower end; NaN where groups are too few to say.
        high: Its upper end.
        groups: How many groups were drawn from.
    """

    value: float
    low: float
    high: float
    groups: int

    @property
    def is_known(self) -> bool:
        """Whether there is an interval at all."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    @property
    def excludes_zero(self) -> bool:
        """Whether the value is of one sign within the whole interval."""
        return self.is_known and (self.low > 0 or self.high < 0)


Split = Sequence[ScoredRow]
"""The rows of a split; of a trial with folds, each fold has one."""


def difference_interval(
    metric: str, one: Sequence[Split], other: Sequence[Split], facts: Mapping[str, RowFacts], *, seed: int = 0
) -> Interval | None:
    """Return how much larger one model's metric is than another's on the rows that both have, with its interval.

    Args:
        metric: Its name.
        one: The rows of one model, a sequence for each split.
        other: Those of the other, of as many splits.
        facts: Groups of rows by id; a row without any is a group of its own.
        seed: Of the draws.

    Returns:
        None where the two share no rows, or the rows do not say what the metric needs.
    """
    found = _differences(metric, one, other)
    return None if found is None else _bootstrap(*found, facts, seed)


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """How much larger one configuration's metric is than another's, each trained with several seeds.

    Attributes:
        value: The mean of the seeds' differences.
        of_seeds: The difference with each seed.
        groups: How many groups of rows were drawn from.
        draws: Values that it could have had as well, by drawing seeds and groups again; empty: too few groups, or the
            metric is undefined with one of the seeds.
    """

    value: float
    of_seeds: tuple[float, ...]
    groups: int
    draws: Floats = field(repr=False)

    def interval(self, level: float = LEVEL) -> Interval:
        """Return the value with its interval, of 95 % or of another level."""
        low, high = _ends(self.draws, level, _SEED_DRAWS)
        return Interval(self.value, low, high, self.groups)


def seed_difference(
    metric: str, one: Sequence[Split], other: Sequence[Split], facts: Mapping[str, RowFacts], *, seed: int = 0
) -> SeedDifference | None:
    """Return how much larger one configuration's metric is than another's, over seeds and the rows that both have.

    Each draw takes groups of rows with replacement, and S - 1 of the S seeds with replacement, the same for both
    configurations: with one seed fewer than there are, the variance of the seeds' mean is the unbiased one (Rao and Wu
    1988, J. Am. Stat. Assoc. 83(401)). So few seeds say little of their variance: deviations from the value are
    multiplied by what makes a t distribution of a normal one, sqrt(f / chi2(f)). Its degrees of freedom f are those of
    Welch and Satterthwaite (1946, Biometrics Bull. 2(6)) of the seeds' part of the variance and the rest.

    Args:
        metric: Its name.
        one: The rows of one configuration, a sequence for each seed.
        other: Those of the other, with the same seeds in the same order.
        facts: Groups of rows by id; a row without any is a group of its own.
        seed: Of the draws.

    Returns:
        None where there are fewer than two seeds, the two share no rows, or the rows do not say what the metric needs.
    """
    found = _differences(metric, one, other)
    if found is None or len(one) < FEWEST_SEEDS:
        return None
    metrics, splits = found
    of_seeds = np.array([metric.value for metric in metrics])
    value, (groups, of_rows) = float(np.mean(of_seeds)), _groups(splits, facts)
    if groups < _FEWEST_GROUPS or not math.isfinite(value):
        return SeedDifference(value, tuple(of_seeds.tolist()), groups, np.empty(0))
    generator, many = np.random.default_rng(seed), len(metrics)
    drawn: list[Floats] = []
    for _ in range(_SEED_DRAWS // _AT_ONCE):
        weights_BG = _counts(generator, groups, groups)
        seeds_SB = _counts(generator, many - 1, many).T
        of_SB = np.array([metric.of(weights_BG[:, of_R]) for metric, of_R in zip(metrics, of_rows, strict=True)])
        drawn.append(np.where(seeds_SB > 0, seeds_SB * of_SB, 0.0).sum(axis=0) / (many - 1))
    draws_B = np.concatenate(drawn)
    variance = float(np.var(draws_B, where=np.isfinite(draws_B)))
    by_seeds = min(1.0, float(np.var(of_seeds, ddof=1)) / many / variance) if variance else 0.0
    freedom = 1 / (by_seeds**2 / (many - 1) + (1 - by_seeds) ** 2 / (groups - 1))
    wider_B = np.sqrt(freedom / generator.chisquare(freedom, len(draws_B)))
    return SeedDifference(value, tuple(of_seeds.tolist()), groups, value + (draws_B - value) * wider_B)


def surviving(differences: Sequence[SeedDifference]) -> tuple[bool, ...]:
    """Return which of several differences are real; with 95 % probability none of them is so by chance.

    It is the step-down procedure of Holm (1979, Scand. J. Stat. 6(2)): of the m that are left, those are real whose
    interval of the level 1 - 0.05 / m excludes zero; until there are no more.
    """
    left = set(range(len(differences)))
    while left:
        level = 1 - (1 - LEVEL) / len(left)
        found = {at for at in left if differences[at].interval(level).excludes_zero}
        if not found:
            break
        left -= found
    return tuple(at not in left for at in range(len(differences)))


def _differences(
    metric: str, one: Sequence[Split], other: Sequence[Split]
) -> tuple[list[RowMetric], list[Split]] | None:
    """Return the difference of a metric on each pair of splits, with the rows that both have."""
    pairs = [_shared(*both) for both in zip(one, other, strict=True)] if len(one) == len(other) else []
    if not pairs or not all(mine for mine, _ in pairs):
        return None
    metrics: list[RowMetric] = []
    for mine, theirs in pairs:
        both = row_metric(metric, mine), row_metric(metric, theirs)
        if both[0] is None or both[1] is None:
            return None
        metrics.append(RowMetric(len(mine), _minus(both[0].of, both[1].of)))
    return metrics, [mine for mine, _ in pairs]


def _shared(one: Split, other: Split) -> tuple[list[ScoredRow], list[ScoredRow]]:
    """Return the rows that both have, in one order; of several with one id the first is the other's first."""
    theirs = dict(zip(_told_apart(other), other, strict=True))
    pairs = [(row, theirs[key]) for key, row in zip(_told_apart(one), one, strict=True) if key in theirs]
    return [mine for mine, _ in pairs], [other for _, other in pairs]


def _told_apart(rows: Split) -> list[tuple[str, int]]:
    """Return for each row its id, and how many rows before it have the same: prompts of one row of the data do."""
    seen = Counter[str]()
    keys: list[tuple[str, int]] = []
    for row in rows:
        keys.append((row.id, seen[row.id]))
        seen[row.id] += 1
    return keys


def _minus(one: Callable[[Floats], Floats], other: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda weights_BR: one(weights_BR) - other(weights_BR)


def _group(facts: Mapping[str, RowFacts], name: str) -> str:
    known = known_facts(facts, name)
    return name if known is None else known.group


def _bootstrap(
    metrics: Sequence[RowMetric], splits: Sequence[Split], facts: Mapping[str, RowFacts], seed: int
) -> Interval:
    value, (groups, of_rows) = float(np.mean([metric.value for metric in metrics])), _groups(splits, facts)
    if groups < _FEWEST_GROUPS:
        return Interval(value, math.nan, math.nan, groups)
    generator = np.random.default_rng(seed)
    drawn: list[Floats] = []
    for _ in range(DRAWS // _AT_ONCE):
        weights_BG = _counts(generator, groups, groups)
        drawn.append(
            np.mean([metric.of(weights_BG[:, of_R]) for metric, of_R in zip(metrics, of_rows, strict=True)], axis=0)
        )
    return Interval(value, *_ends(np.concatenate(drawn), LEVEL, DRAWS), groups)


def _groups(splits: Sequence[Split], facts: Mapping[str, RowFacts]) -> tuple[int, list[NDArray[np.int64]]]:
    """Return the number of groups in all splits together, and of each split the number of each row's group."""
    names = [[_group(facts, row.id) for row in rows] for rows in splits]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(one for rows in names for one in rows))}
    return len(numbers), [np.array([numbers[name] for name in rows], dtype=np.int64) for rows in names]


def _counts(generator: np.random.Generator, drawn: int, of: int) -> Floats:
    """Return how often each of ``of`` things is drawn, with ``drawn`` draws with replacement; (B, of)."""
    return generator.multinomial(drawn, np.full(of, 1 / of), size=_AT_ONCE).astype(np.float64)


def _ends(draws_B: Floats, level: float, asked: int) -> tuple[float, float]:
    """Return the ends of an interval by percentiles; NaN where fewer than half of the draws have a value."""
    known = draws_B[np.isfinite(draws_B)]
    if len(known) < asked // 2:
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# Collapse: a model that gives every row the same answer has learned nothing of the rows, whatever its score.


_FEWEST_ROWS: Final = 2
_SPREAD: Final = 0.01
"""Standard deviation of numbers from which on they differ, as a share of that of the right ones."""
_WORDS: Final = {CLASS: "class", SPAN: "span", TEXT: "answer"}


def collapsed(rows: Sequence[ScoredRow], names: Sequence[str] = ()) -> str:
    """Return in words how a model's answers have collapsed; empty where they have not.

    Each part of an answer is looked at for itself, where the right answers differ and the rows asked for it are two at
    least: one class, or one set of classes, for all rows; no span for any, or the same characters for all; one text.

    Numbers have collapsed where they spread over less than a hundredth of what is right: a model of the mean alone
    still says something else in the last digits.

    Args:
        rows: With their answers.
        names: Of the classes; empty: they are numbers.
    """
    said = [
        f"every row is answered with {_said(part, only, names)}"
        for part in _WORDS
        if (only := _only_answer(part, [row for row in rows if part in row.answer])) is not _DIFFERENT
    ]
    return "; ".join([*said, *_only_number([row for row in rows if NUMBER in row.answer])])


def _only_number(rows: Sequence[ScoredRow]) -> list[str]:
    """Return what is said of numbers that hardly differ; nothing where they do, or where it is right."""
    if len(rows) < _FEWEST_ROWS:
        return []
    right, said = (np.array([part[NUMBER] for part in parts], np.float64) for parts in both_parts(rows))
    if not np.isfinite(said).all() or said.std() >= _SPREAD * right.std():
        return []
    return [f"every row is answered with {said.mean():.4g}, or nearly"]


_DIFFERENT: Final = object()


def _only_answer(part: str, rows: Sequence[ScoredRow]) -> Any:
    """Return the one answer of all rows; ``_DIFFERENT`` where there is none, or it is right for all."""
    if len(rows) < _FEWEST_ROWS:
        return _DIFFERENT
    first = rows[0]
    if any(row.answer[part] != first.answer[part] for row in rows):
        return _DIFFERENT
    return first.answer[part] if any(row.truth[part] != first.truth[part] for row in rows) else _DIFFERENT


def _said(part: str, answer: Any, names: Sequence[str]) -> str:
    match part, answer:
        case "span", None:
            return "no span"
        case "span", [start, end]:
            return f"the characters {start} to {end}"
        case "class", []:
            return "no class"
        case "class", list():
            return f"the classes {', '.join(str(names[one] if names else one) for one in answer)}"
        case "class", _:
            return f"class {names[answer] if names else answer}"
        case _:
            return brief(answer, 80)
