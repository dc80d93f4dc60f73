"""The verdict on a change is what the sets of points say, and every trial that is taken over is a point of today."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, IntDistribution

from dryfit.ledger.events import ComparabilityKey, Compatibility
from dryfit.search.changes import PossibleTrials, comparability_key, compare
from dryfit.search.samplers import suggest
from dryfit.search.space import Distribution, Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, Scalar, TrialRecord
from thinning import examples

MODELS = ["a", "b", "c"]
TENTHS = [0.1, 0.2, 0.3, 0.4]
FINE = [round(0.1 + 0.025 * index, 3) for index in range(13)]
"""Tells every two ranges apart that begin and end at tenths, and a grid of tenths from a range."""
SETTINGS = {"tpe": {"startup_trials": 2}, "nsga2": {"population_size": 2}}


@st.composite
def studies(draw: st.DrawFn) -> dict[str, Any]:
    """A study of models: keys that are searched, or not, always or under a condition, some of which nothing reads."""
    models = draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=3, unique=True))
    table: dict[str, Any] = {"model.name": models}
    sizes = st.lists(st.sampled_from([8, 16, 32]), min_size=1, max_size=3, unique=True)
    cased = draw(st.lists(st.sampled_from(models), unique=True))
    if cased:
        table["train.batch_size"] = [{"choices": draw(sizes), "when": {"model.name": model}} for model in cased]
    elif draw(st.booleans()):
        table["train.batch_size"] = {"choices": draw(sizes)}
    if draw(st.booleans()):
        table["head.layers"] = {"low": draw(st.integers(0, 1)), "high": draw(st.integers(1, 3))}
        if draw(st.booleans()):
            table["head.dropout"] = draw(ranges()) | {"when": {"head.layers": 1}}
    if draw(st.booleans()):
        table["loss.name"] = draw(st.sampled_from([["focal"], ["focal", "cross_entropy"]]))
        table["loss.gamma"] = draw(ranges()) | {"when": {"loss.name": "focal"}}
    own = {
        "train": {"batch_size": draw(st.sampled_from([8, 16]))},
        "head": {"dropout": draw(st.sampled_from(TENTHS))},
        "loss": {"gamma": draw(st.sampled_from(TENTHS))},
    }
    return {"space": table, **own}


@st.composite
def own_functions(draw: st.DrawFn) -> dict[str, Any]:
    """A study of a function of the user's own: what is not drawn has no value."""
    table: dict[str, Any] = {"k": draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=3, unique=True))}
    if draw(st.booleans()):
        kinds = [{"low": 1, "high": draw(st.integers(1, 3))}, {"low": 1.0, "high": draw(st.sampled_from([1.0, 2.0]))}]
        table["n"] = draw(st.sampled_from(kinds))
    if draw(st.booleans()):
        table["x"] = draw(ranges()) | draw(st.sampled_from([{}, {"when": {"k": table["k"][0]}}]))
    return {"study": {"task": "objective"}, "objective": {"function": "m:f"}, "space": table}


@st.composite
def ranges(draw: st.DrawFn) -> dict[str, Any]:
    low, high = sorted((draw(st.sampled_from(TENTHS)), draw(st.sampled_from(TENTHS))))
    return {"low": low, "high": high} | draw(st.sampled_from([{}, {"log": True}, {"step": 0.1}]))


def values_of(distribution: Distribution) -> list[Scalar]:
    """Values that tell every two distributions of this module apart."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    inside = [value for value in [*FINE, 1.0, 1.5, 2.0] if distribution.low <= value <= distribution.high]
    return [value for value in inside if value in TENTHS] if distribution.step is not None else [*inside]


def points_of(space: Space) -> Iterator[dict[str, Scalar]]:
    """All points of a space, as far as the values above tell them apart."""

    def grown(names: list[str], drawn: dict[str, Scalar]) -> Iterator[dict[str, Scalar]]:
        if not names:
            yield drawn
            return
        param = space.active(names[0], drawn)
        for value in values_of(param.distribution) if param is not None else [None]:
            yield from grown(names[1:], drawn if param is None else {**drawn, names[0]: value})

    yield from grown(list(space.names), {})


def trial_of(point: dict[str, Scalar], own: dict[str, Scalar]) -> str:
    """Everything about a trial that acts, so that equal trials have equal texts."""
    whole = {**own, **point}
    if own and whole["loss.name"] != "focal":
        del whole["loss.gamma"]
    return json.dumps(whole, sort_keys=True)


def made(document: dict[str, Any]) -> tuple[StudyConfig, Space, ComparabilityKey, dict[str, Scalar]]:
    config = StudyConfig.model_validate_json(json.dumps(document))
    space = Space.from_config(config)
    basis = comparability_key(config, space, data="", folder=Path("/here"))
    own = {} if config.objective is not None else dict(PossibleTrials(basis).own)
    return config, space, basis, own


pairs = st.one_of(st.tuples(studies(), studies()), st.tuples(own_functions(), own_functions()))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pair=pairs)
def test_the_verdict_is_what_the_points_say(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    (_, old, before, own_before), (_, new, after, own_after) = (made(document) for document in pair)
    was = {trial_of(point, own_before) for point in points_of(old)}
    now = {trial_of(point, own_after) for point in points_of(new)}
    expected = Compatibility.FORKS
    if was <= now:
        expected = Compatibility.SAME if was == now else Compatibility.EXTENDS
    change = compare(before, after)
    assert change.verdict is expected
    assert change.comparable
    assert bool(change.reasons) or expected is Compatibility.SAME
    assert compare(before, before).verdict is Compatibility.SAME
    possible = PossibleTrials(after)
    for point in itertools.islice(points_of(old), 200):
        fits = possible.allows(point, own_before)
        as_number = {"n": float(point["n"])} if isinstance(point.get("n"), int) else {}  # an integer is a number too
        assert fits == (not now.isdisjoint({trial_of(point, own_before), trial_of(point | as_number, own_before)}))
        if fits:
            assert possible.searched_values(point, own_before) is not None
        if expected is not Compatibility.FORKS:
            assert fits


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pair=pairs, sampler=st.sampled_from(["tpe", "random", "qmc", "nsga2"]), seed=st.integers(0, 999))
def test_a_history_from_before_never_stops_a_suggestion(
    pair: tuple[dict[str, Any], dict[str, Any]], sampler: str, seed: int
) -> None:
    """Not even trials that nobody should have told it of."""
    (_, old, _, own), (_, new, after, _) = (made(document) for document in pair)
    search = SearchSettings.model_validate_json(json.dumps({"sampler": sampler} | SETTINGS.get(sampler, {})))
    draw, history = random.Random(seed), list[TrialRecord]()
    every = list(itertools.islice(points_of(old), 500))
    for number in range(8):
        point = draw.choice(every)
        internal = {
            param.internal: point[param.name] for name in point if (param := old.active(name, point)) is not None
        }
        outcome = draw.choice([Outcome.COMPLETE, Outcome.COMPLETE, Outcome.PRUNED, Outcome.REFUSED])
        value = draw.random() if outcome is Outcome.COMPLETE else None
        reports = (MetricPoint(0, 1, 1.0, draw.random(), {}),)
        history.append(TrialRecord(number, internal, {}, outcome, value, reports, own=own))
        read = new.read(internal, own)
        drawn: dict[str, Scalar] = {}
        for name in new.names:
            case = new.active(name, drawn)
            if case is not None and case.internal in read:
                assert case.contains(read[case.internal])
                drawn[name] = read[case.internal]
        if PossibleTrials(after).allows(point, own):
            assert drawn == PossibleTrials(after).searched_values(point, own), "what is told is the whole point"
    for number in range(8, 11):
        found = suggest(
            new, history, search=search, directions=(Direction.MAXIMIZE,), points=(), seed=seed, number=number
        )
        for name in new.names:
            case = new.active(name, found.params)
            assert (case is None) == (name not in found.params)
            assert case is None or case.contains(found.params[name])
        history.append(TrialRecord(number, found.internal, found.distributions, Outcome.COMPLETE, draw.random()))
