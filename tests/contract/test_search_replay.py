"""Nothing lives beside the ledger: from any prefix of the events, the next decision is the undisturbed run's."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dryfit.search.pruning import Rules, judge
from dryfit.search.samplers import Suggestion, suggest
from dryfit.search.space import Space, enqueued_points
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, Scalar, TrialRecord

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


@dataclass(frozen=True)
class Setup:
    """How a study is searched."""

    search: SearchSettings
    directions: tuple[Direction, ...] = (Direction.MAXIMIZE,)

    @property
    def rules(self) -> Rules:
        return Rules(search=self.search, direction=self.directions[0], study="toy", most_reports=REPORTS)

    def suggest(self, history: list[TrialRecord], number: int) -> Suggestion:
        config = CONFIG.model_copy(update={"search": self.search})
        points = enqueued_points(SPACE, config, number)
        args = {"search": self.search, "directions": self.directions, "points": points}
        return suggest(SPACE, history, seed=SEED, number=number, **args)  # type: ignore[arg-type]

    def also(self, params: dict[str, Scalar]) -> tuple[float, ...]:
        """The values of the further goals: none, or one that pulls the other way."""
        dropout = params["head.dropout"]
        assert isinstance(dropout, float)
        return (-dropout,) * (len(self.directions) - 1)


def history_of(events: list[Event]) -> list[TrialRecord]:
    """Rebuild what history knows from the ledger's lines alone."""
    records: dict[int, TrialRecord] = {}
    for event in json.loads(json.dumps(events)):
        number = event["number"]
        match event["type"]:
            case "trial_asked":
                records[number] = TrialRecord(
                    number, event["internal"], event["distributions"], enqueued=event["given"]
                )
            case "report":
                reports = (*records[number].reports, MetricPoint(**event["point"]))
                records[number] = replace(records[number], reports=reports)
            case "verdict":
                attrs = records[number].system_attrs | event["system_attrs"]
                records[number] = replace(records[number], system_attrs=attrs)
            case "trial_finished":
                end = {"outcome": Outcome(event["outcome"]), "value": event["value"]}
                records[number] = replace(records[number], **end, also=tuple(event["also"]))
    return list(records.values())


def curve(params: dict[str, Scalar], n: int) -> float:
    lr, dropout = params["optim.lr"], params["head.dropout"]
    assert isinstance(lr, float) and isinstance(dropout, float)
    return -abs(lr - 1e-4) * 1e3 / (n + 1) - (dropout - 0.1) ** 2 + 0.01 * n * (1 if dropout < 0.25 else -1)


def events_after(events: list[Event], setup: Setup) -> Iterator[Event]:
    """The next event, again and again; what decides is rebuilt from the events alone each time."""
    while True:
        history = history_of(events)
        event = next_event(history, events, setup)
        if event is None:
            return
        yield event
        events = [*events, event]


def next_event(history: list[TrialRecord], events: list[Event], setup: Setup) -> Event | None:
    number = next((record.number for record in history if record.outcome is None), None)
    if number is None:
        number = len(history)
        if number == TRIALS:
            return None
        point = setup.suggest(history, number)
        return {
            "type": "trial_asked",
            "number": number,
            "internal": point.internal,
            "params": point.params,
            "distributions": point.distributions,
            "given": point.enqueued,
        }
    params = next(event["params"] for event in events if event["number"] == number)
    last, reports = events[-1], history[number].reports
    finish = {"type": "trial_finished", "number": number, "value": None, "also": ()}
    if last["type"] == "report":
        answer = judge(history, number, setup.rules)
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
        found = {"value": max(point.value for point in reports), "also": setup.also(params)}
        return finish | {"outcome": Outcome.COMPLETE, **found}
    n = len(reports)
    point = {"n": n, "step": n, "epoch": float(n), "value": curve(params, n), "metrics": {}}
    return {"type": "report", "number": number, "point": point}


SAMPLERS = {
    "tpe": {"startup_trials": 4},
    "random": {},
    "qmc": {},
    "nsga2": {"population_size": 3},
}
OF_ONE_GOAL = {"cmaes": {"startup_trials": 2}}
PRUNERS = {
    "none": {},
    "median": {"pruner_startup_trials": 2},
    "asha": {"reduction": 2},
    "hyperband": {"reduction": 2, "warmup_reports": 0},
    "patient": {"pruner_startup_trials": 2, "patience_reports": 0},
}
POINTS = [{"optim.lr": 1e-3}, {"model.name": "b", "train.batch_size": 5}]


def settings(sampler: str, pruner: str = "none", **more: object) -> SearchSettings:
    options = {"sampler": sampler, "pruner": pruner, **(SAMPLERS | OF_ONE_GOAL)[sampler], **PRUNERS[pruner], **more}
    return SearchSettings.model_validate_json(json.dumps(options))


def check_killed_after_every_event(setup: Setup) -> list[Event]:
    undisturbed = list(events_after([], setup))
    for length in range(len(undisturbed)):
        ledger = json.loads(json.dumps(undisturbed[:length]))
        assert json.dumps(next_event(history_of(ledger), ledger, setup)) == json.dumps(undisturbed[length])
    half = len(undisturbed) // 2
    assert list(events_after(undisturbed[:half], setup)) == undisturbed[half:]
    return undisturbed


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [(sampler, pruner) for sampler in ("tpe", "random") for pruner in PRUNERS]
    + [("qmc", "asha"), ("nsga2", "median"), ("cmaes", "median")],
)
def test_killed_after_every_event(sampler: str, pruner: str) -> None:
    undisturbed = check_killed_after_every_event(Setup(settings(sampler, pruner)))
    kinds = [event["outcome"] for event in undisturbed if event["type"] == "trial_finished"]
    assert len(kinds) == TRIALS
    assert (Outcome.PRUNED in kinds) == (pruner != "none")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_killed_after_every_event_with_several_goals_and_known_points(sampler: str) -> None:
    setup = Setup(settings(sampler, enqueue=POINTS), (Direction.MAXIMIZE, Direction.MINIMIZE))
    asked = [event for event in check_killed_after_every_event(setup) if event["type"] == "trial_asked"]
    assert [event["given"] for event in asked[1:4]] == [*POINTS, {}]
    assert asked[2]["params"]["train.batch_size"] == 5


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "random"])
def test_the_samplers_that_read_history_do(sampler: str) -> None:
    """Without this, a sampler that draws at random would pass all the above."""
    setup = Setup(settings(sampler), (Direction.MAXIMIZE, Direction.MINIMIZE))
    history = history_of(list(events_after([], setup)))
    assert history[-1].values is not None
    by_number = setup.suggest([], len(history)).params
    assert (setup.suggest(history, len(history)).params == by_number) == (sampler == "qmc")


def test_decisions_are_those_of_trials_that_ran_side_by_side() -> None:
    """A suggestion made while others run sees them as running, whatever they become later."""
    setup = Setup(settings("tpe"))
    done = history_of(list(events_after([], setup)))
    open_ones = [*done[:-2], *(replace(record, outcome=None, value=None) for record in done[-2:])]
    beside = setup.suggest(open_ones, TRIALS)
    assert beside == setup.suggest(open_ones, TRIALS)
    assert beside != setup.suggest(done, TRIALS)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_points_that_are_added_later_are_the_next_trials(sampler: str) -> None:
    before, after = Setup(settings(sampler)), Setup(settings(sampler, enqueue=POINTS))
    events = list(events_after([], before))
    asked = [index for index, event in enumerate(events) if event["type"] == "trial_asked"]
    ledger = events[: asked[6]]
    for number, point in ((6, POINTS[0]), (7, POINTS[1]), (8, {})):
        event = next_event(history_of(ledger), ledger, after)
        assert event is not None and event["number"] == number
        assert event["given"] == point
        assert event["params"].items() >= point.items()
        finished = {"type": "trial_finished", "number": number, "outcome": "failed", "value": None, "also": ()}
        ledger = [*ledger, event, finished]
