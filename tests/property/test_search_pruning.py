"""Verdicts are those of Optuna's own pruners on one Optuna study with all trials, but for a trial's last report.

Optuna does not know which report is a trial's last: it would end the trial there although nothing of it is left to
save. So a trial that Optuna ends at its last report is told to Optuna as complete, as dryfit has it.
"""

import json
import warnings
from math import nan

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
)

from dryfit.ledger.state import History
from dryfit.search.pruning import Rules, judge
from dryfit.search.samplers import suggest
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, TrialRecord
from thinning import examples

pytestmark = pytest.mark.usefixtures("quiet_optuna")


VALUES = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, nan, float("inf"), float("-inf")]))
Reports = list[list[float | None]]
CURVES = st.lists(st.lists(st.none() | VALUES, min_size=1, max_size=10), min_size=1, max_size=14)
"""The reports of each trial; None stands for a step without one."""


def compare_runs(
    search: SearchSettings, direction: Direction, pruner: BasePruner, curves: Reports, most_reports: int = 10
) -> None:
    first_step = 0 if search.deciding_pruner in ("median", "percentile") else 1
    study = optuna.create_study(study_name="dryfit-throw-away:toy", direction=direction.value, pruner=pruner)
    rules = Rules(search=search, direction=direction, study="toy", most_reports=most_reports)
    history: list[TrialRecord] = []
    for number, curve in enumerate(curves):
        trial = study.ask()
        record = TrialRecord(number, {}, {})
        stopped, final = False, nan
        for n, value in enumerate(curve):
            if value is None:
                continue
            final = value
            point = MetricPoint(n, n, float(n), value, {})
            attrs = dict(record.system_attrs)
            record = TrialRecord(number, {}, {}, reports=(*record.reports, point), system_attrs=attrs)
            trial.report(value, n + first_step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the library's own way with NaN warns
                expected = trial.should_prune()
            verdict = judge([*history, record], number, rules)
            assert verdict.proceed == (not expected)
            assert verdict == judge((*history, record), number, rules)
            at_end = judge([*history, record], number, rules, last=True)
            assert at_end.proceed and at_end.system_attrs == verdict.system_attrs
            record.system_attrs.update(verdict.system_attrs)
            kept = study.get_trials(deepcopy=False)[number].system_attrs
            assert {key: value for key, value in kept.items() if "rung" in key} == record.system_attrs
            if expected and any(later is not None for later in curve[n + 1 :]):
                stopped = True
                break
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


@settings(max_examples=examples(340), deadline=None)
@given(
    curves=CURVES,
    direction=st.sampled_from(list(Direction)),
    of=st.sampled_from(["median", "percentile", "asha", "hyperband"]),
    patience=st.none() | st.integers(0, 3),
    min_delta=st.sampled_from([0.0, 0.5, 3.0]),
    warmup=st.integers(0, 2),
    number=st.integers(0, 4),
    percentile=st.sampled_from([0.0, 25.0, 33.3, 50.0, 66.7, 100.0]),
    most=st.integers(1, 12) | st.sampled_from([16, 27, 125, 1000]),
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_each_pruner(
    curves: Reports,
    direction: Direction,
    of: str,
    patience: int | None,
    min_delta: float,
    warmup: int,
    number: int,
    percentile: float,
    most: int,
) -> None:
    """Alone and behind a patient one; ``number`` is the startup trials of the first two, or decides the reduction."""
    reduction = 2 + number % 3
    options: dict[str, object] = {"pruner": of, "warmup_reports": warmup}
    options |= {"pruner_startup_trials": number} if of in ("median", "percentile") else {"reduction": reduction}
    options |= {"percentile": percentile} if of == "percentile" else {}
    inner: dict[str, BasePruner] = {
        "median": MedianPruner(n_startup_trials=number, n_warmup_steps=warmup),
        "percentile": PercentilePruner(percentile, n_startup_trials=number, n_warmup_steps=warmup),
        "asha": SuccessiveHalvingPruner(min_resource=warmup + 1, reduction_factor=reduction),
        "hyperband": HyperbandPruner(min_resource=warmup + 1, max_resource=most, reduction_factor=reduction),
    }
    pruner = inner[of]
    if patience is not None:
        options |= {"pruner": "patient", "patient_of": of, "patience_reports": patience, "min_delta": min_delta}
        pruner = PatientPruner(pruner, patience=patience, min_delta=min_delta)
    search = SearchSettings.model_validate_json(json.dumps(options))
    compare_runs(search, direction, pruner, curves, most_reports=most if of == "hyperband" else 10)


def test_hyperband_deals_trials_out_to_brackets_that_differ() -> None:
    """A poor trial is stopped at the first rung of its bracket: the brackets show in where the stops fall."""
    search = SearchSettings.model_validate_json(
        json.dumps({"pruner": "hyperband", "warmup_reports": 0, "reduction": 2})
    )
    rules = Rules(search=search, direction=Direction.MAXIMIZE, study="toy", most_reports=8)
    best = {f"completed_rung_{rung}": 1.0 for rung in range(4)}
    history = [TrialRecord(number, {}, {}, Outcome.COMPLETE, 1.0, (), dict(best)) for number in range(40)]
    stops: set[int] = set()
    for number in range(40, 60):
        points = tuple(MetricPoint(n, n, float(n), 0.0, {}) for n in range(8))
        verdicts = [
            judge([*history, TrialRecord(number, {}, {}, reports=points[: n + 1])], number, rules) for n in range(8)
        ]
        stops.add(next(n for n, verdict in enumerate(verdicts) if not verdict.proceed))
    assert stops == {0, 1, 3, 7}
    named_otherwise = Rules(search=search, direction=Direction.MAXIMIZE, study="other", most_reports=8)
    poor = [TrialRecord(n, {}, {}, reports=(MetricPoint(0, 0, 0.0, 0.0, {}),)) for n in range(40, 60)]
    dealt = [[judge([*history, one], one.number, each).proceed for one in poor] for each in (rules, named_otherwise)]
    assert dealt[0] != dealt[1]


# ---- A history that was asked all along says what the same trials say to one who sees them for the first time


SEARCHES = {
    "tpe": {"sampler": "tpe", "startup_trials": 2, "pruner": "asha", "warmup_reports": 0, "reduction": 2},
    "random": {"sampler": "random", "pruner": "median", "warmup_reports": 0, "pruner_startup_trials": 1},
    "qmc": {"sampler": "qmc", "pruner": "hyperband", "warmup_reports": 0, "reduction": 2},
    "cmaes": {"sampler": "cmaes", "startup_trials": 2, "pruner": "percentile", "warmup_reports": 0},
    "nsga2": {
        "sampler": "nsga2",
        "population_size": 3,
        "pruner": "patient",
        "patient_of": "asha",
        "patience_reports": 1,
    },
}
SPACE = {
    "model.name": ["a", "b"],
    "train.batch_size": {"choices": [1, 2, 4], "when": {"model.name": "a"}},
    "optim.lr": {"low": 1e-4, "high": 1.0, "log": True},
}
ENDS = [Outcome.COMPLETE, Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED, Outcome.REFUSED]
MOST = 4


@pytest.mark.parametrize(
    ("name", "goals"), [(name, goals) for name in SEARCHES for goals in (1, 2) if (name, goals) != ("cmaes", 2)]
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_a_warm_history_says_what_a_fresh_one_says(name: str, goals: int, random) -> None:  # type: ignore[no-untyped-def]
    search = SearchSettings.model_validate_json(json.dumps(SEARCHES[name]))
    space = Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": SPACE})))
    directions = (Direction.MAXIMIZE, Direction.MINIMIZE)[:goals]
    rules = Rules(search=search, direction=directions[0], study="toy", most_reports=MOST)
    past = History()
    for _ in range(40):
        running = past.running
        if len(running) < 3 and random.random() < 0.5:
            number = len(past)
            asked = {"search": search, "directions": directions, "points": (), "seed": 1, "number": number}
            drawn = suggest(space, past, **asked)
            assert drawn == suggest(space, list(past), **asked)
            past.put(TrialRecord(number, drawn.internal, drawn.distributions))
        elif running:
            trial = random.choice(running)
            n = len(trial.reports)
            if n == MOST or (n and random.random() < 0.4):
                past.put(ended(trial, random.choice(ENDS), random.choice([0.1, 0.5, random.random()]), goals))
                continue
            point = MetricPoint(n, n, float(n), random.choice([0.5, random.random()]), {})
            past.put(changed(trial, (*trial.reports, point), {}))
            verdict = judge(past, trial.number, rules)
            assert verdict == judge(list(past), trial.number, rules)
            past.put(changed(trial, (*trial.reports, point), verdict.system_attrs))


def changed(trial: TrialRecord, reports: tuple[MetricPoint, ...], attrs: dict[str, float]) -> TrialRecord:
    return TrialRecord(
        trial.number, trial.params, trial.distributions, reports=reports, system_attrs=trial.system_attrs | attrs
    )


def ended(trial: TrialRecord, outcome: Outcome, value: float, goals: int) -> TrialRecord:
    own, also = (value, (1 - value,) * (goals - 1)) if outcome is Outcome.COMPLETE else (None, ())
    return TrialRecord(
        trial.number, trial.params, trial.distributions, outcome, own, trial.reports, trial.system_attrs, also
    )


WARM_VALUES = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, float("nan"), float("inf"), float("-inf")]))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reports=st.lists(st.tuples(st.integers(0, 5), WARM_VALUES, st.booleans()), max_size=60),
    direction=st.sampled_from(list(Direction)),
    reduction=st.integers(2, 4),
    brackets=st.booleans(),
)
def test_rungs_among_trials_that_run_side_by_side(
    reports: list[tuple[int, float, bool]], direction: Direction, reduction: int, brackets: bool
) -> None:
    """As in one Optuna study that lives all along: six trials report in turn, and some end between."""
    options = {"pruner": "hyperband" if brackets else "asha", "warmup_reports": 0, "reduction": reduction}
    search = SearchSettings.model_validate_json(json.dumps(options))
    rules = Rules(search=search, direction=direction, study="toy", most_reports=9)
    pruner: BasePruner = (
        HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=reduction)
        if brackets
        else SuccessiveHalvingPruner(min_resource=1, reduction_factor=reduction)
    )
    study = optuna.create_study(study_name="dryfit-throw-away:toy", direction=direction.value, pruner=pruner)
    trials, past = [study.ask() for _ in range(6)], History(TrialRecord(number, {}, {}) for number in range(6))
    for which, value, ends in reports:
        number = sorted(past.running, key=lambda record: record.number)[which % len(past.running)].number
        record = past.get(number)
        n = len(record.reports)
        record = changed(record, (*record.reports, MetricPoint(n, n, float(n), value, {})), {})
        past.put(record)
        trials[number].report(value, n + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            stop = trials[number].should_prune()
        verdict = judge(past, number, rules)
        assert verdict.proceed == (not stop)
        record = changed(record, record.reports, verdict.system_attrs)
        kept = study.get_trials(deepcopy=False)[number].system_attrs
        assert {key: one for key, one in kept.items() if "rung" in key} == record.system_attrs
        if stop or ends:
            study.tell(trials[number], state=optuna.trial.TrialState.PRUNED)
            past.put(ended(record, Outcome.PRUNED, 0.0, 1))
            trials.append(study.ask())
            past.put(TrialRecord(len(trials) - 1, {}, {}))
        else:
            past.put(record)
