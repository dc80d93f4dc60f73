"""Confidence intervals of metrics and of their differences, by a bootstrap over groups of rows.

Rows of one group (a person's posts, a document's windows) are not independent: whole groups are drawn, with
replacement, and the percentiles of what comes out are the interval (Efron and Tibshirani 1993, chapter 13; of clusters:
Cameron, Gelbach and Miller 2008, Rev. Econ. Stat. 90(3)). Where configurations were trained with several seeds, seeds
are drawn too, independently of the groups: every seed has every row, and so rows and seeds are crossed (the pigeonhole
bootstrap of Owen 2007, Ann. Appl. Stat. 1(2), which is, if anything, a little wide).

Dimension suffixes: ``R`` rows, ``G`` groups, ``B`` draws, ``S`` seeds.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dryfit.scoring.row_metrics import Floats, RowMetric, row_metric
from dryfit.scoring.scored_row import RowFacts, ScoredRow, known_facts

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
