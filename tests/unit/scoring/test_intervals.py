from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from dryfit.tasks.row_metrics import (
    Interval,
    SeedDifference,
    Split,
    difference_interval,
    seed_difference,
    surviving,
)
from dryfit.tasks.scored_rows import RowFacts, ScoredRow


def right_or_wrong(right: np.ndarray, labels: np.ndarray) -> list[ScoredRow]:
    answers = np.where(right, labels, 1 - labels)
    return [
        ScoredRow(str(row), {"class": int(label)}, {"class": int(answer)}, (float(1 - answer), float(answer)))
        for row, (label, answer) in enumerate(zip(labels, answers, strict=True))
    ]


def interval_of(metric: str, splits: list[Split], facts: dict[str, RowFacts]) -> Interval | None:
    """The interval of a metric itself: of its difference from a model for which the metric is 0 on any rows."""
    nothing = [
        [replace(row, answer={name: 1 - label for name, label in row.truth.items()}, values={"m": 0.0}) for row in rows]
        for rows in splits
    ]
    return difference_interval(metric, splits, nothing, facts)


def test_interval_of_a_share_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    rows = right_or_wrong(rng.random(400) < 0.7, labels)
    found = interval_of("accuracy", [rows], {})
    assert found is not None and found.groups == 400
    half = 1.96 * np.sqrt(found.value * (1 - found.value) / 400)
    assert found.low == pytest.approx(found.value - half, abs=0.006)
    assert found.high == pytest.approx(found.value + half, abs=0.006)


def test_rows_of_one_group_are_drawn_together() -> None:
    rng = np.random.default_rng(1)
    right = np.repeat(rng.random(40) < 0.7, 10)  # ten rows of a group are all right, or all wrong
    rows = right_or_wrong(right, rng.integers(0, 2, 400))
    alone = interval_of("accuracy", [rows], {})
    facts = {row.id: RowFacts(str(int(row.id) // 10)) for row in rows}
    together = interval_of("accuracy", [rows], facts)
    assert alone is not None and together is not None and together.groups == 40
    wider = (together.high - together.low) / (alone.high - alone.low)
    assert wider == pytest.approx(np.sqrt(10), rel=0.15)


def test_the_two_prompts_of_a_row_are_of_its_group() -> None:
    rows = [ScoredRow(f"r{at // 2} ({('criteria', 'evidence')[at % 2]})", {}, {}, values={"m": at}) for at in range(40)]
    found = interval_of("m", [rows], {f"r{at}": RowFacts(f"g{at // 2}") for at in range(20)})
    assert found is not None and found.groups == 10


def test_coverage_is_near_what_it_says() -> None:
    rng, hit = np.random.default_rng(2), 0
    for seed in range(60):
        right = rng.random((2, 150)) < np.array([[0.8], [0.7]])
        labels = rng.integers(0, 2, 150)
        one, other = (right_or_wrong(each, labels) for each in right)
        found = difference_interval("accuracy", [one], [other], {}, seed=seed)
        hit += found.low <= 0.1 <= found.high
    assert 52 <= hit <= 60  # 57 expected of 60


def test_equal_answers_differ_by_nothing() -> None:
    rng = np.random.default_rng(3)
    rows = right_or_wrong(rng.random(50) < 0.6, rng.integers(0, 2, 50))
    found = difference_interval("f1_macro", [rows], [rows[::-1]], {})
    assert found is not None and (found.value, found.low, found.high) == (0, 0, 0)
    assert not found.excludes_zero


def test_only_shared_rows_count_and_none_is_no_interval() -> None:
    rng = np.random.default_rng(4)
    rows = right_or_wrong(np.ones(30, dtype=bool), rng.integers(0, 2, 30))
    wrong = right_or_wrong(np.zeros(30, dtype=bool), rng.integers(0, 2, 30))
    found = difference_interval("accuracy", [rows[:20]], [wrong[10:]], {})
    assert found is not None and found.groups == 10
    assert difference_interval("accuracy", [rows[:10]], [wrong[10:]], {}) is None
    assert difference_interval("accuracy", [rows], [rows, rows], {}) is None
    assert difference_interval("token_f1", [rows], [wrong], {}) is None


def test_few_groups_have_no_interval() -> None:
    rows = right_or_wrong(np.array([True, False, True]), np.array([0, 1, 1]))
    found = interval_of("accuracy", [rows], {})
    assert found is not None and not found.is_known and not found.excludes_zero
    assert found.value == pytest.approx(2 / 3)


def test_folds_are_averaged() -> None:
    rng = np.random.default_rng(5)
    first = right_or_wrong(np.ones(20, dtype=bool), rng.integers(0, 2, 20))
    second = right_or_wrong(np.zeros(60, dtype=bool), rng.integers(0, 2, 60))
    found = interval_of("accuracy", [first, second], {})
    assert found is not None and found.value == 0.5


def seeds_of(rng: np.random.Generator, labels: np.ndarray, share: float, spread: float, seeds: int) -> list[Split]:
    """The answers of a configuration with several seeds, each of which is somewhat better or worse on all rows."""
    shares = share + spread * rng.standard_normal(seeds)
    return [right_or_wrong(rng.random(len(labels)) < one, labels) for one in shares]


@pytest.mark.parametrize("seeds", [2, 4])
def test_seeds_that_differ_are_covered_and_rows_alone_are_not_enough(seeds: int) -> None:
    rng, hit, of_rows, tries = np.random.default_rng(seeds), 0, 0, 40
    labels = rng.integers(0, 2, 80)
    for seed in range(tries):
        one, other = (seeds_of(rng, labels, share, 0.1, seeds) for share in (0.75, 0.65))
        found = seed_difference("accuracy", one, other, {}, seed=seed)
        rows = difference_interval("accuracy", one, other, {}, seed=seed)
        assert found is not None and rows is not None and found.value == pytest.approx(rows.value)
        ends = found.interval()
        hit += ends.low <= 0.1 <= ends.high
        of_rows += rows.low <= 0.1 <= rows.high
    assert hit >= 34 > of_rows  # 38 of 40 expected; 34 is three standard deviations below


def test_seeds_that_agree_leave_the_interval_of_the_rows() -> None:
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 2, 300)
    one, other = (right_or_wrong(rng.random(300) < share, labels) for share in (0.8, 0.6))
    facts = {row.id: RowFacts(str(int(row.id) // 3)) for row in one}
    found = seed_difference("accuracy", [one] * 4, [other] * 4, facts)
    alone = difference_interval("accuracy", [one], [other], facts)
    assert found is not None and alone is not None and found.groups == alone.groups == 100
    ends = found.interval()
    assert (ends.low, ends.high) == (pytest.approx(alone.low, abs=0.01), pytest.approx(alone.high, abs=0.01))
    assert found.of_seeds == pytest.approx([alone.value] * 4)
    wide = found.interval(0.99)
    assert wide.low < ends.low and wide.high > ends.high


def test_equal_configurations_with_seeds_differ_by_nothing() -> None:
    rng = np.random.default_rng(8)
    runs = [right_or_wrong(rng.random(40) < 0.6, rng.integers(0, 2, 40)) for _ in range(3)]
    found = seed_difference("f1_macro", runs, runs, {})
    assert found is not None and (found.interval().low, found.interval().high) == (0, 0)
    assert surviving([found]) == (False,)


def test_what_cannot_be_compared_over_seeds_has_no_interval() -> None:
    rng = np.random.default_rng(9)
    runs = [right_or_wrong(rng.random(30) < 0.6, rng.integers(0, 2, 30)) for _ in range(2)]
    assert seed_difference("accuracy", runs[:1], runs[1:], {}) is None
    assert seed_difference("token_f1", runs, runs, {}) is None
    few = seed_difference("accuracy", [run[:3] for run in runs], [run[:3] for run in runs], {})
    assert few is not None and not few.interval().is_known and surviving([few]) == (False,)


def shifted(value: float) -> SeedDifference:
    """A difference whose interval is that of a normal distribution of width 1."""
    return SeedDifference(value, (value, value), 50, value + GRID)


GRID = np.array([NormalDist().inv_cdf((at + 0.5) / 5_000) for at in range(5_000)])


def test_holm_asks_more_of_the_surest_of_many_and_less_of_the_next() -> None:
    # Two-sided 5 % of one, two and three comparisons: 1.96, 2.24 and 2.39 standard deviations.
    assert surviving([shifted(2.1)]) == (True,)
    assert surviving([shifted(2.1), shifted(0.0)]) == (False, False)
    assert surviving([shifted(-3.0), shifted(2.1)]) == (True, True)
    assert surviving([shifted(3.0), shifted(2.3), shifted(2.0)]) == (True, True, True)
    assert surviving([shifted(3.0), shifted(2.1), shifted(2.0)]) == (True, False, False)
    assert surviving([]) == ()
