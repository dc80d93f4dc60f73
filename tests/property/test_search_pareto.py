"""Pareto fronts: fast ones and the ledger's own, against the definition."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dryfit.ledger.events import StudyCreated, TrialAsked, TrialFinished
from dryfit.ledger.replay import StudyState
from dryfit.search.history_view import best_spread, non_dominated
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.trial import Goal, Outcome, as_losses, dominates
from thinning import examples

FEW = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, float("inf"), float("-inf")])
VALUES = st.one_of(FEW, st.floats(-2, 2))


def points_of(goals: int, values: st.SearchStrategy[float] = VALUES) -> st.SearchStrategy[list[tuple[float, ...]]]:
    return st.lists(st.tuples(*[values] * goals), max_size=30)


def by_definition(points: list[tuple[float, ...]]) -> list[int]:
    """Smaller is better: nobody is at least as good everywhere and better somewhere."""
    return [
        index
        for index, one in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, one, strict=True)) and any(a < b for a, b in zip(other, one, strict=True))
            for other in points
        )
    ]


@settings(max_examples=examples(150), deadline=None)
@given(points=st.integers(1, 4).flatmap(points_of))
def test_the_front_is_that_of_the_definition(points: list[tuple[float, ...]]) -> None:
    goals = len(points[0]) if points else 1
    assert non_dominated(np.array(points).reshape(-1, goals)).tolist() == by_definition(points)
    for one in points:
        assert not dominates(one, one)
        assert all(not (dominates(one, other) and dominates(other, one)) for other in points)


@settings(max_examples=examples(100), deadline=None)
@given(points=points_of(2, st.floats(-2, 2)), count=st.integers(0, 12))
@example(points=[(1.0, -1.0), (1.0, -1.0), (0.0, 0.0)], count=2)  # a copy of one end is not the other end
def test_the_best_are_whole_fronts_and_the_ends_of_the_last(points: list[tuple[float, float]], count: int) -> None:
    chosen: list[int] = best_spread(np.array(points).reshape(-1, 2), count).tolist()
    assert len(chosen) == len(set(chosen)) == min(count, len(points))
    left = dict(enumerate(points))
    while left:
        numbers = list(left)
        front = {numbers[at] for at in by_definition([left[number] for number in numbers])}
        taken = front & set(chosen)
        if taken != front:
            if len(taken) >= 2:
                for goal in range(2):
                    assert min(points[n][goal] for n in front) in {points[n][goal] for n in taken}
            assert not (set(left) - front) & set(chosen)
            break
        left = {number: point for number, point in left.items() if number not in front}


@settings(max_examples=examples(100), deadline=None)
@given(
    values=st.lists(st.tuples(*[st.one_of(FEW, st.just(float("nan")))] * 2), max_size=20),
    directions=st.tuples(*[st.sampled_from(list(Direction))] * 2),
)
def test_the_front_of_a_ledger_is_that_of_the_definition(
    values: list[tuple[float, float]], directions: tuple[Direction, Direction]
) -> None:
    also = (Goal(name="ece", direction=directions[1]),)
    state = StudyState()
    state.apply(
        StudyCreated(
            id="i", name="n", task=BuiltInTask.CRITERIA, metric=Metric.F1_MACRO, direction=directions[0], also=also,
            seed=0, space="[]",
        )
    )  # fmt: skip
    for number, (value, other) in enumerate(values):
        state.apply(TrialAsked(number=number, params={}, internal={}, distributions={}, seed=0, fingerprint=""))
        before = [trial.values for trial in state.front]
        patience = state.finished_since_best
        state.apply(TrialFinished(number=number, outcome=Outcome.COMPLETE, value=value, also=(other,)))
        moved = {trial.values for trial in state.front} != set(before)
        assert state.finished_since_best == (0 if moved else patience + 1)
    losses = [(number, found) for number, one in enumerate(values) if (found := as_losses(one, directions))]
    expected = [losses[at][0] for at in by_definition([found for _, found in losses])]
    assert [trial.number for trial in state.front] == expected


def test_nan_compares_with_nothing() -> None:
    assert as_losses((1.0, float("nan")), (Direction.MAXIMIZE, Direction.MINIMIZE)) is None
    assert as_losses((1.0, 2.0), (Direction.MAXIMIZE, Direction.MINIMIZE)) == (-1.0, 2.0)
    with pytest.raises(ValueError, match="zip"):
        as_losses((1.0,), (Direction.MAXIMIZE, Direction.MINIMIZE))
