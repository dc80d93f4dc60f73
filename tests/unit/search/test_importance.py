"""Parameter importance: what decides is found, conditions are counted, trouble is a reason and no error."""

import random
import sys

from dryfit.core.choices import Direction
from dryfit.core.trial import Outcome
from dryfit.search import importance
from dryfit.search.importance import importances_of
from ledgers import Script, drawn, eventful, score


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


def test_too_few_trials_are_a_reason() -> None:
    found = importances_of(eventful(8).state().history(), Direction.MAXIMIZE)
    assert found.params == ()
    assert "at least 10 complete trials" in found.missing


def test_a_process_that_fails_or_hangs_is_a_reason(monkeypatch) -> None:
    history = eventful(20).state().history()
    late = importances_of(history, Direction.MAXIMIZE, timeout_s=0.001)
    assert late.params == ()
    assert "did not answer" in late.missing
    monkeypatch.setattr(importance.sys, "executable", "/bin/false")
    failed = importances_of(history, Direction.MAXIMIZE)
    assert "exit status 1" in failed.missing
    monkeypatch.setattr(importance.sys, "executable", f"{sys.prefix}/no-such-python")
    assert "did not answer" in importances_of(history, Direction.MAXIMIZE).missing
