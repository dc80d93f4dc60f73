"""A history that was asked all along says what the same trials say to one who sees them for the first time.

So what deciders keep between two questions changes nothing, whatever runs side by side and in whichever order it ends.
"""

import json
import warnings

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.pruners import BasePruner, HyperbandPruner, SuccessiveHalvingPruner

from dryfit.ledger.state import History
from dryfit.search.pruning import Rules, judge
from dryfit.search.samplers import suggest
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, TrialRecord
from thinning import examples

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


pytestmark = pytest.mark.usefixtures("quiet_optuna")


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


VALUES = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, float("nan"), float("inf"), float("-inf")]))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reports=st.lists(st.tuples(st.integers(0, 5), VALUES, st.booleans()), max_size=60),
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
        assert record is not None
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
