"""Confidence intervals of metrics and of their differences, by a bootstrap over groups of rows.

Rows of one group (a person's posts, a document's windows) are not independent: whole groups are drawn, with
replacement, and the percentiles of what comes out are the interval (Efron and Tibshirani 1993, chapter 13; of clusters:
Cameron, Gelbach and Miller 2008, Rev. Econ. Stat. 90(3)).

Dimension suffixes: ``R`` rows, ``G`` groups, ``B`` draws.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dryfit.scoring.row_metrics import Floats, RowMetric, row_metric
from dryfit.scoring.scored_row import RowFacts, ScoredRow, known_facts

DRAWS: Final = 2_000
"""Draws of groups: the ends of a 95 % interval then vary by about a twentieth of its width."""
LEVEL: Final = 0.95
_AT_ONCE: Final = 100
_FEWEST_GROUPS: Final = 5
"""With fewer groups a percentile of draws says nothing."""


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


def value_interval(
    metric: str, splits: Sequence[Split], facts: Mapping[str, RowFacts], *, seed: int = 0
) -> Interval | None:
    """Return a metric's value with its interval; of several splits, the mean of the values. None: no such metric."""
    metrics = [row_metric(metric, rows) for rows in splits]
    return _bootstrap([one for one in metrics if one is not None], splits, facts, seed) if all(metrics) else None


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
    pairs = [_shared(*both) for both in zip(one, other, strict=True)] if len(one) == len(other) else []
    if not pairs or not all(mine for mine, _ in pairs):
        return None
    metrics: list[RowMetric] = []
    for mine, theirs in pairs:
        both = row_metric(metric, mine), row_metric(metric, theirs)
        if both[0] is None or both[1] is None:
            return None
        metrics.append(RowMetric(len(mine), _minus(both[0].of, both[1].of)))
    return _bootstrap(metrics, [mine for mine, _ in pairs], facts, seed)


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
    value = float(np.mean([metric.value for metric in metrics]))
    names = [[_group(facts, row.id) for row in rows] for rows in splits]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(one for rows in names for one in rows))}
    groups, of_rows = len(numbers), [np.array([numbers[name] for name in rows]) for rows in names]
    if groups < _FEWEST_GROUPS:
        return Interval(value, math.nan, math.nan, groups)
    generator = np.random.default_rng(seed)
    drawn: list[Floats] = []
    for _ in range(DRAWS // _AT_ONCE):
        weights_BG = generator.multinomial(groups, np.full(groups, 1 / groups), size=_AT_ONCE).astype(np.float64)
        drawn.append(
            np.mean([metric.of(weights_BG[:, of_R]) for metric, of_R in zip(metrics, of_rows, strict=True)], axis=0)
        )
    known = np.concatenate(drawn)
    known = known[np.isfinite(known)]
    if len(known) < DRAWS // 2:
        return Interval(value, math.nan, math.nan, groups)
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), groups)
