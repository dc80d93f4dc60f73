"""Parameter importance: what decides is found, conditions are counted, too little is a reason."""

import random

from optuna.distributions import CategoricalDistribution, FloatDistribution

from dryfit.search.importance import importances_of
from dryfit.search.space import to_text
from dryfit.settings.choices import Direction
from dryfit.settings.trial import Outcome, TrialRecord
from ledgers import Script, begun, drawn, eventful, score


def test_what_decides_the_metric_is_found_and_conditions_are_counted() -> None:
    source, script = random.Random(3), Script()
    script.begin()
    for number in range(120):
        params = drawn(source)
        script.ask(number, params)
        script.finish(number, Outcome.COMPLETE, score(params, source))
    script.ask(120, drawn(source))
    script.finish(120, Outcome.COMPLETE, float("nan"))
    script.ask(121, drawn(source))
    script.finish(121, Outcome.PRUNED)
    found = importances_of(script.state().history(), Direction.MAXIMIZE)
    assert (found.trials, found.top, found.missing) == (120, 12, "")
    shares = {param.name: param.share for param in found.params}
    assert found.params[0].name == "optim.lr"
    assert shares["optim.lr"] > 0.5
    assert sum(shares.values()) == 1.0 or abs(sum(shares.values()) - 1) < 1e-9
    focal = sum(trial.params["loss.name"] == "focal" for trial in script.state().trials[:120])
    counts = {param.name: param.trials for param in found.params}
    assert counts["loss.gamma"] == focal < 120
    assert counts["optim.lr"] == 120


def test_a_space_that_changed_on_the_way_counts_whole() -> None:
    """Nine models became seven, and the learning rate's range moved: each is one parameter, asked of all its trials."""
    source, history = random.Random(1), list[TrialRecord]()
    for number in range(200):
        models = "abcdefghi" if number < 100 else "abcdefg"
        rates = FloatDistribution(1e-6, 1e-3, log=True) if number < 100 else FloatDistribution(1e-5, 1e-2, log=True)
        drawn = {"model.name": source.choice(models), "optim.lr": rates.low * 1000 ** source.random()}
        distributions = {"model.name": CategoricalDistribution(list(models)), "optim.lr": rates}
        value = (drawn["model.name"] in ("a", "b")) + 0.01 * source.random()
        texts = {name: to_text(one) for name, one in distributions.items()}
        history.append(TrialRecord(number, drawn, texts, Outcome.COMPLETE, value))
    found = importances_of(history, Direction.MAXIMIZE)
    assert [(param.name, param.trials) for param in found.params] == [("model.name", 200), ("optim.lr", 200)]
    assert found.params[0].share > 0.6
    assert abs(sum(param.share for param in found.params) - 1) < 1e-9


def test_too_few_trials_are_a_reason() -> None:
    found = importances_of(eventful(8).state().history(), Direction.MAXIMIZE)
    assert found.params == ()
    assert "at least 10 complete trials" in found.missing


def test_nothing_searched_is_a_reason() -> None:
    script = begun()
    for number in range(12):
        script.ask(number, {})
        script.finish(number, Outcome.COMPLETE, 0.5)
    found = importances_of(script.state().history(), Direction.MAXIMIZE)
    assert (found.params, found.missing) == ((), "no parameter could take more than one value")
