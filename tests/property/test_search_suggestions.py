"""Suggestions lie in the space, meet every condition, and depend on nothing but their arguments."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dryfit.search.samplers import suggest
from dryfit.search.space import Space, apply_params, enqueued_points
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, TrialRecord

SETTINGS = {"tpe": {"startup_trials": 3}, "nsga2": {"population_size": 3}}
MODELS = ["a", "b", "c"]
FLOATS = st.floats(0.001, 0.9, allow_nan=False)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, object]:
    """A space with up to three levels of conditions."""
    models = draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=3, unique=True))
    table: dict[str, object] = {"model.name": models}
    sizes = st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True)
    cased = draw(st.lists(st.sampled_from(models), unique=True))
    if cased:
        table["train.batch_size"] = [{"choices": draw(sizes), "when": {"model.name": model}} for model in cased]
    layers = draw(st.integers(0, 4))
    table["head.layers"] = {"low": 0, "high": layers, "when": {"model.name": models[0]}}
    low, high = sorted((draw(FLOATS), draw(FLOATS)))
    table["head.dropout"] = {"low": low, "high": high, "log": draw(st.booleans()), "when": {"head.layers": layers}}
    low, high = sorted((draw(FLOATS), draw(FLOATS)))
    table["optim.lr"] = {"low": low, "high": high, "log": draw(st.booleans())}
    table["optim.weight_decay"] = {"low": 0.1, "high": 0.1 + 0.1 * draw(st.integers(1, 5)), "step": 0.1}
    table["optim.weight_decay"]["high"] = round(table["optim.weight_decay"]["high"], 1)  # type: ignore[index]
    keys = draw(st.permutations(list(table)))
    return {key: table[key] for key in keys}


def made(table: dict[str, object]) -> tuple[Space, StudyConfig]:
    config = StudyConfig.model_validate_json(json.dumps({"space": table}))
    return Space.from_config(config), config


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    table=tables(),
    later=tables(),
    sampler=st.sampled_from(["tpe", "random", "qmc", "nsga2", "cmaes"]),
    outcomes=st.lists(st.sampled_from([*Outcome, None]), min_size=12, max_size=12),
    values=st.lists(st.floats(width=32), min_size=12, max_size=12),
    seed=st.integers(0, 2**31 - 1),
)
def test_suggestions_lie_in_the_space(
    table: dict[str, object],
    later: dict[str, object],
    sampler: str,
    outcomes: list[Outcome | None],
    values: list[float],
    seed: int,
) -> None:
    search = SearchSettings.model_validate_json(json.dumps({"sampler": sampler} | SETTINGS.get(sampler, {})))
    history: list[TrialRecord] = []
    for number, (outcome, value) in enumerate(zip(outcomes, values, strict=True)):
        # Half way the study file changes: the rest of the history is of another space.
        space, config = made(table if number < 6 else later)
        base = config.trial_settings
        points = enqueued_points(space, config, number)
        directions = (Direction.MAXIMIZE,)
        given_ = {"search": search, "directions": directions, "points": points, "seed": seed, "number": number}
        point = suggest(space, history, **given_)  # type: ignore[arg-type]
        assert point == suggest(space, tuple(history), **given_)  # type: ignore[arg-type]
        for name in space.names:
            case = space.active(name, point.params)
            if case is None:
                assert name not in point.params
            else:
                assert case.contains(point.params[name])
                assert point.internal[case.internal] == point.params[name]
        assert point.internal.keys() == point.distributions.keys()
        assert len(point.internal) == len(point.params)
        apply_params(base, point.params)
        written = json.loads(json.dumps([point.internal, point.distributions]))
        reports = (MetricPoint(0, 1, 1.0, value, {}),)
        history.append(TrialRecord(number, written[0], written[1], outcome, value, reports))
