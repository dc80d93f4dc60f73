"""Nothing lives beside the ledger: from any prefix of the events, the next decision is the undisturbed run's."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dryfit.config.schema import SearchSettings, StudyConfig
from dryfit.core.settings import Direction
from dryfit.core.trial import MetricPoint, Outcome, Scalar, TrialRecord
from dryfit.search.pruning import judge
from dryfit.search.space import Space
from dryfit.search.suggest import suggest

CONFIG = StudyConfig.model_validate_json(
    json.dumps(
        {
            "space": {
                "train.batch_size": [
                    {"choices": [8, 16], "when": {"model.name": "a"}},
                    {"low": 2, "high": 6, "when": {"model.name": "b"}},
                ],
                "model.name": ["a", "b"],
                "optim.lr": {"low": 1e-6, "high": 1e-2, "log": True},
                "head.dropout": {"low": 0.0, "high": 0.5},
            }
        }
    )
)
SPACE = Space.from_config(CONFIG)
TRIALS, REPORTS, SEED = 14, 4, 5
ENDS = {3: Outcome.FAILED, 5: Outcome.REFUSED, 8: Outcome.CANCELLED}

Event = dict[str, Any]


def history_of(events: list[Event]) -> list[TrialRecord]:
    """Rebuild what history knows from the ledger's lines alone."""
    records: dict[int, TrialRecord] = {}
    for event in json.loads(json.dumps(events)):
        number = event["number"]
        match event["type"]:
            case "trial_asked":
                records[number] = TrialRecord(number, event["internal"], event["distributions"])
            case "report":
                reports = (*records[number].reports, MetricPoint(**event["point"]))
                records[number] = replace(records[number], reports=reports)
            case "verdict":
                attrs = records[number].system_attrs | event["system_attrs"]
                records[number] = replace(records[number], system_attrs=attrs)
            case "trial_finished":
                records[number] = replace(records[number], outcome=Outcome(event["outcome"]), value=event["value"])
    return list(records.values())


def curve(params: dict[str, Scalar], n: int) -> float:
    lr, dropout = params["optim.lr"], params["head.dropout"]
    assert isinstance(lr, float) and isinstance(dropout, float)
    return -abs(lr - 1e-4) * 1e3 / (n + 1) - (dropout - 0.1) ** 2 + 0.01 * n


def events_after(events: list[Event], search: SearchSettings) -> Iterator[Event]:
    """The next event, again and again; what decides is rebuilt from the events alone each time."""
    while True:
        history = history_of(events)
        event = next_event(history, events, search)
        if event is None:
            return
        yield event
        events = [*events, event]


def next_event(history: list[TrialRecord], events: list[Event], search: SearchSettings) -> Event | None:
    number = next((record.number for record in history if record.outcome is None), None)
    if number is None:
        number = len(history)
        if number == TRIALS:
            return None
        base = CONFIG.trial_settings
        point = suggest(
            SPACE, history, search=search, direction=Direction.MAXIMIZE, base=base, seed=SEED, number=number
        )
        return {
            "type": "trial_asked",
            "number": number,
            "internal": point.internal,
            "params": point.params,
            "distributions": point.distributions,
        }
    params = next(event["params"] for event in events if event["number"] == number)
    last, reports = events[-1], history[number].reports
    finish = {"type": "trial_finished", "number": number, "value": None}
    if last["type"] == "report":
        answer = judge(history, number, search=search, direction=Direction.MAXIMIZE)
        return {
            "type": "verdict",
            "number": number,
            "proceed": answer.proceed,
            "system_attrs": answer.system_attrs,
        }
    if last["type"] == "verdict" and not last["proceed"]:
        return finish | {"outcome": Outcome.PRUNED}
    if len(reports) == 2 and number in ENDS:
        return finish | {"outcome": ENDS[number]}
    if len(reports) == REPORTS:
        return finish | {"outcome": Outcome.COMPLETE, "value": max(point.value for point in reports)}
    n = len(reports)
    point = {"n": n, "step": n, "epoch": float(n), "value": curve(params, n), "metrics": {}}
    return {"type": "report", "number": number, "point": point}


@pytest.mark.parametrize("pruner", ["asha", "median", "none"])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_killed_after_every_event(sampler: str, pruner: str) -> None:
    options = {"sampler": sampler, "pruner": pruner, "startup_trials": 4, "reduction": 2, "pruner_startup_trials": 2}
    search = SearchSettings.model_validate_json(json.dumps(options))
    undisturbed = list(events_after([], search))
    kinds = [event["outcome"] for event in undisturbed if event["type"] == "trial_finished"]
    assert len(kinds) == TRIALS
    assert (Outcome.PRUNED in kinds) == (pruner != "none")
    for length in range(len(undisturbed)):
        ledger = json.loads(json.dumps(undisturbed[:length]))
        assert next_event(history_of(ledger), ledger, search) == undisturbed[length]
    assert list(events_after(undisturbed[: len(undisturbed) // 2], search)) == undisturbed[len(undisturbed) // 2 :]


def test_decisions_are_those_of_trials_that_ran_side_by_side() -> None:
    """A suggestion made while others run sees them as running, whatever they become later."""
    search = SearchSettings.model_validate_json(json.dumps({"sampler": "tpe", "startup_trials": 4}))
    done = history_of(list(events_after([], search)))
    open_ones = [*done[:-2], *(replace(record, outcome=None, value=None) for record in done[-2:])]
    args = {"search": search, "direction": Direction.MAXIMIZE, "base": CONFIG.trial_settings, "seed": SEED}
    beside = suggest(SPACE, open_ones, number=TRIALS, **args)  # type: ignore[arg-type]
    assert beside == suggest(SPACE, open_ones, number=TRIALS, **args)  # type: ignore[arg-type]
    assert beside != suggest(SPACE, done, number=TRIALS, **args)  # type: ignore[arg-type]
