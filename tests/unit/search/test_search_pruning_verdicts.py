import json
from math import nan

import pytest

from dryfit.search.pruning import PruneVerdict, Rules, judge, most_reports
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.errors import InternalError
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, TrialRecord


def settings(**changes: object) -> SearchSettings:
    return SearchSettings.model_validate_json(json.dumps(changes))


def record(
    number: int, values: list[float], outcome: Outcome | None = None, rungs: dict[str, float] | None = None
) -> TrialRecord:
    points = tuple(MetricPoint(n, n, float(n), value, {}) for n, value in enumerate(values))
    value = values[-1] if outcome is Outcome.COMPLETE else None
    return TrialRecord(number, {}, {}, outcome, value, points, rungs or {})


def rules(search: SearchSettings) -> Rules:
    return Rules(search=search, direction=Direction.MAXIMIZE, study="toy", most_reports=3)


def verdict(history: list[TrialRecord], search: SearchSettings) -> PruneVerdict:
    return judge(history, history[-1].number, rules(search))


GOOD = [record(n, [0.5, 0.6, 0.7], Outcome.COMPLETE) for n in range(5)]


def test_no_pruner_never_stops_a_trial() -> None:
    assert verdict([*GOOD, record(5, [nan, nan])], settings(pruner="none")).proceed


def test_nothing_reported_goes_on_and_an_unknown_trial_is_our_bug() -> None:
    assert verdict([*GOOD, record(5, [])], settings(pruner="asha")).proceed
    with pytest.raises(InternalError):
        judge(GOOD, 9, rules(settings(pruner="asha")))


def test_most_reports_is_of_the_longest_trial_in_the_space() -> None:
    def most(space: dict[str, object]) -> int:
        config = StudyConfig.model_validate_json(json.dumps({"space": space, "train": {"epochs": 2}}))
        return most_reports(Space.from_config(config), config.trial_settings)

    assert most({}) == 2
    assert most({"train.epochs": [1, 6, 3], "train.evals_per_epoch": {"low": 1, "high": 4}}) == 24
    some = {"model.name": ["a", "b"], "train.epochs": {"choices": [1], "when": {"model.name": "a"}}}
    assert most(some) == 2


@pytest.mark.parametrize("pruner", ["median", "percentile", "asha", "hyperband", "patient"])
def test_no_pruner_ends_a_trial_at_its_last_report(pruner: str) -> None:
    """It is trained to its end: what it paid for counts, and others are compared with the rungs it reached."""
    some = {"pruner": pruner, "warmup_reports": 0}
    search = settings(**some, **({"patience_reports": 0} if pruner == "patient" else {}))
    others = [record(one.number, [0.5, 0.6, 0.7], Outcome.COMPLETE, {"completed_rung_0": 0.6}) for one in GOOD]
    poor = [*others, record(5, [0.1, 0.0])]
    before, at_end = (judge(poor, 5, rules(search), last=last) for last in (False, True))
    assert not before.proceed and at_end.proceed
    assert at_end.system_attrs == before.system_attrs
    assert at_end.reason == f"{before.reason}, but trained to its end"
    fine = [*others, record(5, [0.9, 0.9])]
    assert judge(fine, 5, rules(search), last=True) == judge(fine, 5, rules(search))


def test_a_trial_that_has_ended_is_not_judged() -> None:
    with pytest.raises(InternalError, match="no running trial 4"):
        judge(GOOD, 4, rules(settings(pruner="median")))


def folded(number: int, values: list[list[float]], outcome: Outcome | None = None) -> TrialRecord:
    """A trial of folds of three reports each."""
    points = tuple(
        MetricPoint(3 * fold + n, 0, 0.0, value, {}, fold + 1)
        for fold, found in enumerate(values)
        for n, value in enumerate(found)
    )
    value = values[-1][-1] if outcome is Outcome.COMPLETE else None
    return TrialRecord(number, {}, {}, outcome, value, points)


def test_an_easy_fold_shields_no_trial_in_the_next() -> None:
    """Optuna's median compares a trial's best so far: of another fold that says how hard its rows were."""
    search = settings(pruner="median", warmup_reports=0, pruner_startup_trials=3)
    others = [folded(n, [[0.9, 0.9, 0.9], [0.6, 0.7, 0.7]], Outcome.COMPLETE) for n in range(4)]
    as_easy = [0.9, 0.9, 0.9]
    assert verdict([*others, folded(4, [as_easy])], search).proceed
    assert verdict([*others, folded(4, [as_easy, [0.6]])], search).proceed
    assert not verdict([*others, folded(4, [as_easy, [0.5]])], search).proceed
    assert verdict([*others, folded(4, [as_easy, [0.7, 0.6]])], search).proceed, "its best of this fold counts"


def test_patience_begins_anew_with_each_fold() -> None:
    search = settings(pruner="patient", patience_reports=1, warmup_reports=0, pruner_startup_trials=0)
    others = [folded(n, [[0.9] * 3, [0.9] * 3], Outcome.COMPLETE) for n in range(3)]
    low = [0.8, 0.8, 0.8]
    assert verdict([*others, folded(3, [low, [0.4, 0.4]])], search).proceed, "nothing of this fold is better"
    assert not verdict([*others, folded(3, [low, [0.6, 0.4, 0.4]])], search).proceed
