"""Early stopping is what its words say, tried on every prefix of a trial's validations."""

from math import inf, isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dryfit.settings.choices import Direction
from dryfit.settings.tables import TrainSettings
from dryfit.settings.trial import MetricPoint
from dryfit.training.trainer import stopped_early
from thinning import examples

pytestmark = pytest.mark.heavy

VALUES = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 1.25, 3.0, nan, inf, -inf]), max_size=12)


def better_ones(values: list[float], min_delta: float) -> list[int]:
    """Of larger-is-better values, those above the one before them in this list by more than ``min_delta``."""
    found: list[int] = []
    while True:
        last = values[found[-1]] if found else nan
        after = range(found[-1] + 1 if found else 0, len(values))
        following = [n for n in after if not isnan(values[n]) and (isnan(last) or values[n] - min_delta > last)]
        if not following:
            return found
        found.append(following[0])


@settings(max_examples=examples(300), deadline=None)
@given(
    values=VALUES,
    patience=st.integers(0, 4),
    min_delta=st.sampled_from([0.0, 0.125, 0.5, 10.0]),
    direction=st.sampled_from(list(Direction)),
)
def test_it_stops_where_the_last_validations_were_not_better(
    values: list[float], patience: int, min_delta: float, direction: Direction
) -> None:
    train = TrainSettings(early_stopping=patience, early_stopping_min_delta=min_delta)
    sign = 1.0 if direction is Direction.MAXIMIZE else -1.0
    points = tuple(MetricPoint(n, n, float(n), sign * value, {}) for n, value in enumerate(values))
    for size in range(len(values) + 1):
        found = better_ones(values[:size], min_delta)
        since = size - 1 - found[-1] if found else size
        assert stopped_early(points[:size], train, direction) == (patience > 0 and since >= patience)
