"""What deciders keep of the history is all that they need of it, in whichever order trials end."""

from collections.abc import Sequence
from math import isnan

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dryfit.search.history_view import Window, best_spread, is_visible
from dryfit.search.pruning import Curves, quantile
from dryfit.settings.choices import Direction
from dryfit.settings.trial import MetricPoint, Outcome, TrialRecord
from thinning import examples

BEST, LAST = 3, 6
VALUES = st.one_of(st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf")]), st.floats(-3, 3))


@st.composite
def ended(draw: st.DrawFn) -> tuple[list[TrialRecord], tuple[Direction, ...]]:
    """Trials by number, each with an end, and what is better."""
    goals = draw(st.integers(1, 3))
    count = draw(st.integers(0, 30))
    records = [
        TrialRecord(
            number,
            {},
            {},
            draw(st.sampled_from([Outcome.COMPLETE, Outcome.COMPLETE, Outcome.COMPLETE, *Outcome])),
            draw(VALUES),
            also=tuple(draw(VALUES) for _ in range(goals - 1)),
        )
        for number in range(count)
    ]
    return records, tuple(draw(st.sampled_from(list(Direction))) for _ in range(goals))


def read(told: Sequence[TrialRecord], directions: tuple[Direction, ...]) -> list[int]:
    """The window by its definition, worked out from all trials."""
    if len(told) <= BEST + LAST:
        return [record.number for record in told]
    complete = [record for record in told if record.outcome is Outcome.COMPLETE]
    signs = [-1.0 if direction is Direction.MAXIMIZE else 1.0 for direction in directions]
    if len(directions) == 1:
        best = sorted(complete, key=lambda record: (signs[0] * (record.value or 0.0), record.number))[:BEST]
    else:
        losses = np.array([record.values for record in complete]).reshape(-1, len(directions)) * signs
        best = [complete[index] for index in best_spread(losses, BEST).tolist()]
    return sorted({record.number for record in (*best, *told[-LAST:])})


@settings(max_examples=examples(300), deadline=None)
@given(study=ended(), refused=st.booleans(), random=st.randoms(use_true_random=False))
def test_the_window_is_that_of_all_trials(study, refused, random) -> None:  # type: ignore[no-untyped-def]
    records, directions = study
    window = Window(directions, refused=refused, best=BEST, last=LAST)
    seen: list[TrialRecord] = []
    for record in random.sample(records, len(records)):
        window.apply(record)
        seen = sorted([*seen, record], key=lambda one: one.number)
        told = [one for one in seen if is_visible(one, len(directions), refused=refused)]
        assert window.count == len(told)
        assert [one.number for one in window.records()] == read(told, directions)


@settings(max_examples=examples(300), deadline=None)
@given(
    values=st.lists(VALUES.filter(lambda value: not isnan(value)), min_size=1, max_size=12),
    percent=st.sampled_from([0.0, 25.0, 50.0, 100.0]) | st.floats(0, 100),
)
def test_a_percentile_of_two_values_is_that_of_all(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    with np.errstate(invalid="ignore"):
        whole, part = float(np.nanpercentile(ordered, percent)), quantile(ordered, percent)
    assert part == whole or (isnan(part) and isnan(whole))


@given(curves=st.lists(st.lists(VALUES, max_size=4), max_size=8))
def test_curves_are_those_of_complete_trials(curves: list[list[float]]) -> None:
    kept = Curves()
    for number, curve in enumerate(curves):
        points = tuple(MetricPoint(n, n, float(n), value, {}) for n, value in enumerate(curve))
        kept.apply(TrialRecord(number, {}, {}, Outcome.COMPLETE if number % 2 else Outcome.PRUNED, 0.0, points))
    complete = curves[1::2]
    assert kept.complete == len(complete)
    for n in range(5):
        at_n = [curve[n] for curve in complete if len(curve) > n and not isnan(curve[n])]
        assert list(kept.at(n)) == sorted(at_n)
