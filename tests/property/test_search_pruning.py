"""Verdicts on a throw-away study are those of one Optuna study that lives all along."""

import json
import warnings
from collections.abc import Iterator
from math import nan

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.pruners import BasePruner, MedianPruner, SuccessiveHalvingPruner

from dryfit.config.schema import SearchSettings
from dryfit.core.settings import Direction
from dryfit.core.trial import MetricPoint, Outcome, TrialRecord
from dryfit.search.pruning import judge


@pytest.fixture(autouse=True)
def quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


VALUES = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, nan, float("inf"), float("-inf")]))
CURVES = st.lists(st.lists(VALUES, min_size=1, max_size=10), min_size=1, max_size=14)


def compare_runs(search: SearchSettings, direction: Direction, pruner: BasePruner, curves: list[list[float]]) -> None:
    first_step = 1 if search.pruner.value == "asha" else 0
    study = optuna.create_study(direction=direction.value, pruner=pruner)
    history: list[TrialRecord] = []
    for number, curve in enumerate(curves):
        trial = study.ask()
        record = TrialRecord(number, {}, {})
        stopped = False
        for n, value in enumerate(curve):
            point = MetricPoint(n, n, float(n), value, {})
            attrs = dict(record.system_attrs)
            record = TrialRecord(number, {}, {}, reports=(*record.reports, point), system_attrs=attrs)
            trial.report(value, n + first_step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the library's own way with NaN warns
                expected = trial.should_prune()
            verdict = judge([*history, record], number, search=search, direction=direction)
            assert verdict.proceed == (not expected)
            assert verdict == judge((*history, record), number, search=search, direction=direction)
            record.system_attrs.update(verdict.system_attrs)
            kept = study.get_trials(deepcopy=False)[number].system_attrs
            assert {key: value for key, value in kept.items() if "rung" in key} == record.system_attrs
            if expected:
                stopped = True
                break
        final = curve[-1]
        if stopped:
            outcome = Outcome.PRUNED
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif final != final:
            outcome = Outcome.FAILED
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            outcome = Outcome.COMPLETE
            study.tell(trial, final)
        history.append(TrialRecord(number, {}, {}, outcome, final, record.reports, record.system_attrs))


@settings(max_examples=60, deadline=None)
@given(
    curves=CURVES,
    direction=st.sampled_from(list(Direction)),
    warmup=st.integers(0, 2),
    reduction=st.integers(2, 4),
)
def test_asha(curves: list[list[float]], direction: Direction, warmup: int, reduction: int) -> None:
    options = {"pruner": "asha", "warmup_reports": warmup, "reduction": reduction}
    search = SearchSettings.model_validate_json(json.dumps(options))
    pruner = SuccessiveHalvingPruner(min_resource=warmup + 1, reduction_factor=reduction)
    compare_runs(search, direction, pruner, curves)


@settings(max_examples=60, deadline=None)
@given(curves=CURVES, direction=st.sampled_from(list(Direction)), warmup=st.integers(0, 2), startup=st.integers(0, 4))
def test_median(curves: list[list[float]], direction: Direction, warmup: int, startup: int) -> None:
    options = {"pruner": "median", "warmup_reports": warmup, "pruner_startup_trials": startup}
    search = SearchSettings.model_validate_json(json.dumps(options))
    compare_runs(search, direction, MedianPruner(n_startup_trials=startup, n_warmup_steps=warmup), curves)
