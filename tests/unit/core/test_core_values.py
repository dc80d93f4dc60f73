import json
import math
import statistics
from dataclasses import replace

import pytest

from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import ConfigError, DryfitError, ExitStatus, InternalError
from dryfit.settings.execution import ExecutionPlan, ExecutionSettings, plan_execution
from dryfit.settings.files import read_model, write_model, write_text_atomic
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.splits import derive_seed
from dryfit.settings.tables import DataSettings, TrainSettings, TrialSettings
from dryfit.settings.trial import (
    FoldScore,
    MetricPoint,
    Outcome,
    TrialConfig,
    TrialRecord,
    best_first,
    best_point,
    better,
    fold_means,
    fold_spreads,
)
from dryfit.settings.wire import ErrorParts, Verdict, canonical_json

NAN, INFINITY = float("nan"), float("inf")


def test_an_error_shows_its_four_parts_and_crosses_a_process():
    error = ConfigError("reading x", "found 3", "1 or 2", "change it")
    assert str(error) == "reading x: found 3    [CONFIG]\n  allowed: 1 or 2\n  next: change it"
    again = ErrorParts.model_validate_json(ErrorParts.of(error).model_dump_json()).rebuilt()
    assert type(again) is ConfigError
    assert str(again) == str(error)
    assert isinstance(ErrorParts(code="NEWER", doing="a", found="b").rebuilt(), InternalError)
    assert error.exit_status is ExitStatus.CANNOT_RUN


def test_every_error_class_has_a_code_of_its_own():
    classes = DryfitError.__subclasses__()
    assert len({cls.code for cls in classes}) == len(classes) >= 9


def test_seeds_depend_on_all_parts_and_their_borders():
    assert derive_seed("a", 1) == derive_seed("a", 1)
    assert len({derive_seed("a", 1), derive_seed("a", 2), derive_seed("a1"), derive_seed("a", "1", "")}) == 4
    assert all(0 <= derive_seed(number) < 2**31 for number in range(1000))
    assert derive_seed("\ud800") != derive_seed("\ud801")  # half a character, as JSON may hold


@pytest.mark.parametrize(
    ("value", "than", "direction", "answer"),
    [
        (2, 1, Direction.MAXIMIZE, True),
        (1, 1, Direction.MAXIMIZE, False),
        (1, 2, Direction.MINIMIZE, True),
        (NAN, 1, Direction.MAXIMIZE, False),
        (1, NAN, Direction.MINIMIZE, True),
        (NAN, NAN, Direction.MAXIMIZE, False),
    ],
)
def test_better(value, than, direction, answer):
    assert better(value, than, direction) is answer


def test_the_best_point_is_the_earliest_of_equals():
    points = tuple(MetricPoint(n, n, float(n), value, {}) for n, value in enumerate((NAN, 0.5, 0.7, 0.7)))
    assert best_point(points, Direction.MAXIMIZE) == points[2]
    assert best_point(points, Direction.MINIMIZE) == points[1]
    assert best_point(points[:1], Direction.MAXIMIZE) is None


def test_trials_are_ranked_by_value_then_number():
    trials = [TrialRecord(n, {}, {}, value=value) for n, value in enumerate((0.5, None, 0.7, NAN, 0.7, -INFINITY))]
    assert [trial.number for trial in best_first(trials[::-1], Direction.MAXIMIZE)] == [2, 4, 0, 5]
    assert [trial.number for trial in best_first(trials[::-1], Direction.MINIMIZE)] == [5, 0, 2, 4]
    collapsed = [replace(trial, is_collapsed=trial.number in (2, 5)) for trial in trials]
    assert [trial.number for trial in best_first(collapsed, Direction.MAXIMIZE)] == [4, 0, 2, 5]
    assert [trial.number for trial in best_first(collapsed, Direction.MINIMIZE)] == [0, 4, 5, 2]


def test_only_finished_work_counts():
    assert [outcome for outcome in Outcome if outcome.counts] == [Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED]


def config(**changes):
    fields = {
        "number": 1, "task": BuiltInTask.CRITERIA, "metric": Metric.F1_MACRO, "direction": Direction.MAXIMIZE,
        "data": DataSettings(), "settings": TrialSettings(), "params": {"optim.lr": 1.0}, "seed": 1,
    }  # fmt: skip
    return TrialConfig(**(fields | changes))


def test_a_fingerprint_is_of_what_changes_the_result():
    assert config().fingerprint == config(number=2, params={}).fingerprint
    assert config().fingerprint != config(seed=2).fingerprint
    assert config().fingerprint != config(data_fingerprint="x").fingerprint
    stopping = TrialSettings(train=TrainSettings(early_stopping=2, early_stopping_min_delta=0.1))
    assert config().fingerprint != config(settings=stopping).fingerprint
    assert TrialConfig.model_validate_json(config().model_dump_json()) == config()


@pytest.mark.parametrize(("wish", "micro", "steps"), [(None, 10, 1), (4, 4, 3), (10, 10, 1), (99, 10, 1), (1, 1, 10)])
def test_a_plan_covers_the_effective_batch(wish, micro, steps):
    plan = plan_execution(
        ExecutionSettings(micro_batch=wish), effective_batch=10, device=DeviceKind.CPU, cores=3, parallel=2
    )
    assert (plan.micro_batch, plan.accumulation, plan.threads) == (micro, steps, 1)


def test_a_plan_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="accumulation is 2"):
        ExecutionPlan(device=DeviceKind.CPU, effective_batch=9, micro_batch=3, accumulation=2)


def test_canonical_json_has_one_form():
    assert canonical_json({"b": 1, "a": [1.5, "é"]}) == canonical_json(json.loads('{"a":[1.5,"é"],"b":1}'))


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "verdict.json"
    assert read_model(path, Verdict) is None
    write_model(path, Verdict(n=1, proceed=True))
    write_model(path, Verdict(n=2, proceed=False), durable=False)
    assert read_model(path, Verdict) == Verdict(n=2, proceed=False)
    write_text_atomic(path, "x")
    assert [item.name for item in tmp_path.iterdir()] == ["verdict.json"]


def test_means_and_spreads_of_folds() -> None:
    folds = [FoldScore(value, (also,), 1, 1, 1) for value, also in ((0.5, 3.0), (0.75, 4.0), (0.7, 8.0))]
    values, also = [one.value for one in folds], [one.also[0] for one in folds]
    assert fold_means(folds) == pytest.approx((statistics.fmean(values), statistics.fmean(also)), rel=1e-15)
    assert fold_spreads(folds) == pytest.approx((statistics.stdev(values), statistics.stdev(also)), rel=1e-12)
    assert fold_spreads(folds[:1]) == fold_spreads([]) == ()
    endless = [FoldScore(value, (), 1, 1, 1) for value in (float("inf"), 1.0)]
    assert fold_means(endless) == (float("inf"),)
    assert math.isnan(fold_spreads(endless)[0])
