"""Which numbers, steps and values the reports of a trial's folds have."""

import math

from dryfit.settings.trial import FoldScore, MetricPoint
from dryfit.training.run import ALONE, FoldPosition

POINT = MetricPoint(n=2, step=7, epoch=1.5, value=0.25, metrics={"loss": 0.25})
DONE = (FoldScore(0.5, (), 3, 8, 10), FoldScore(0.75, (), 10, 10, 10))


def test_a_trial_that_trains_once_reports_as_it_counts() -> None:
    assert ALONE.reported(POINT, None) is POINT
    assert ALONE.reported(POINT, 0.1) is POINT
    assert (ALONE.number, ALONE.steps_before, ALONE.total_steps(9), str(ALONE)) == (0, 0, 9, "")


def test_reports_of_a_fold_stand_behind_those_of_the_folds_before() -> None:
    place = FoldPosition(5, DONE, reports=6)
    assert (place.number, place.steps_before, str(place)) == (3, 18, " of fold 3 of 5")
    assert place.total_steps(10) == 18 + 3 * 10
    assert place.reported(POINT, None) == MetricPoint(14, 25, 1.5, (0.5 + 0.75 + 0.25) / 3, {"loss": 0.25}, 3)


def test_the_last_report_of_a_fold_has_its_last_number_and_its_best_value() -> None:
    place = FoldPosition(5, DONE, reports=6)
    last = place.reported(POINT, 0.125)
    assert (last.n, last.value) == (17, (0.5 + 0.75 + 0.125) / 3)
    assert last.metrics == POINT.metrics
    following = FoldPosition(5, (*DONE, FoldScore(0.125, (), 4, 7, 10)), reports=6)
    assert following.reported(MetricPoint(0, 1, 0.1, 0.5, {}), None).n == 18


def test_a_fold_without_a_number_has_no_mean() -> None:
    assert math.isnan(FoldPosition(5, DONE, reports=6).reported(POINT, math.nan).value)
