"""What the process of Gaussian processes is asked: from the history alone, refused trials as infeasible points."""

import json
from collections.abc import Mapping
from math import inf, nan

from dryfit.ledger.state import History
from dryfit.search.samplers import GpQuestion, SamplerInput, Suggestion, drawn_otherwise, suggest_at
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SamplerName, SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, Scalar, TrialRecord

SPACE = Space.from_config(
    StudyConfig.model_validate_json(
        json.dumps(
            {
                "space": {
                    "optim.lr": {"low": 1e-5, "high": 1e-1, "log": True},
                    "optim.name": ["adamw", "sgd"],
                    "train.epochs": [3],
                    "optim.beta2": {"low": 0.9, "high": 0.99, "when": {"optim.name": "adamw"}},
                }
            }
        )
    )
)
POINT: dict[str, Scalar] = {"optim.lr": 1e-3, "optim.name": "adamw"}


class Asked:
    """Stands for the process: keeps its questions and answers all alike."""

    def __init__(self, answer: Mapping[str, Scalar] | None) -> None:
        self.questions: list[GpQuestion] = []
        self._answer = answer

    def __call__(self, question: GpQuestion) -> Mapping[str, Scalar] | None:
        self.questions.append(question)
        return self._answer


def record(number: int, outcome: Outcome | None = Outcome.COMPLETE, value: float | None = 0.5, **more) -> TrialRecord:  # type: ignore[no-untyped-def]
    params: dict[str, Scalar] = {"optim.lr": 1e-4, "optim.name": "sgd", "train.epochs": 3}
    return TrialRecord(number, params, {}, outcome, value if outcome is Outcome.COMPLETE else None, **more)


def next_point(
    history: list[TrialRecord] | History, asked: Asked, sampler: str = "gp", goals: int = 1, number: int = 99
) -> Suggestion:
    search = SearchSettings(sampler=SamplerName(sampler), startup_trials=2)
    directions = (Direction.MAXIMIZE, Direction.MINIMIZE)[:goals]
    past = history if isinstance(history, History) else History(history)
    inputs = SamplerInput(SPACE, past, search, directions, seed=1, number=number, ask_gp=asked)
    return suggest_at(inputs, {})


def test_it_is_asked_once_for_the_keys_without_a_condition() -> None:
    asked = Asked(POINT)
    drawn = next_point([record(0), record(1, value=0.75)], asked)
    (question,) = asked.questions
    assert list(question.space) == ["optim.lr", "optim.name"]
    assert [trial.values for trial in question.trials] == [(0.5,), (0.75,)]
    assert all(trial.excess is None for trial in question.trials)
    assert {name: drawn.params[name] for name in POINT} == POINT
    assert "optim.beta2" in drawn.params and drawn.params["train.epochs"] == 3
    assert drawn_otherwise(SPACE, SamplerName.GP) == ("optim.beta2",)
    assert drawn_otherwise(SPACE, SamplerName.CMAES) == ("optim.name", "train.epochs", "optim.beta2")
    assert drawn_otherwise(SPACE, SamplerName.TPE) == ()


def test_without_an_answer_or_enough_trials_it_is_tpe_s() -> None:
    silent = Asked(None)
    enough = [record(0), record(1)]
    assert next_point(enough, silent) == next_point(enough, silent, "tpe")
    assert len(silent.questions) == 1
    few = [record(0), record(1, Outcome.PRUNED), record(2, value=nan), record(3, Outcome.REFUSED, excess=0.5)]
    assert next_point(few, silent) == next_point(few, silent, "tpe")
    assert len(silent.questions) == 1


def test_what_did_not_fit_is_infeasible_with_the_worst_value() -> None:
    asked = Asked(POINT)
    history = [
        record(0, value=0.25, also=(9.0,), excess=-0.5),
        record(1, value=0.75, also=(1.0,), excess=0.25),  # it was planned in vain, and fitted after all
        record(2, Outcome.REFUSED, excess=0.5),
        record(3, Outcome.REFUSED),
        record(4, Outcome.FAILED),
        record(5, Outcome.PRUNED, reports=(MetricPoint(0, 1, 1.0, 0.9, {}),)),
        record(6, value=inf, also=(1.0,)),
        record(7, None),
    ]
    next_point(history, asked, goals=2)
    found = [(trial.values, trial.excess) for trial in asked.questions[0].trials]
    assert found == [((0.25, 9.0), -0.5), ((0.75, 1.0), 0.0), ((0.25, 9.0), 0.5), ((0.25, 9.0), 0.1), ((), None)]


def test_a_history_that_grew_asks_what_a_fresh_one_asks() -> None:
    grown, questions = History(), list[GpQuestion]()
    for number in range(260):
        outcome = [Outcome.COMPLETE, Outcome.REFUSED, Outcome.PRUNED][number * 7 % 3]
        grown.put(record(number, outcome, value=(number * 37 % 101) / 101, excess=number / 100 - 1))
        if number % 20 == 19:
            asked = Asked(POINT)
            for history in (grown, list(grown)):
                next_point(history, asked, number=number + 1)
            assert asked.questions[0] == asked.questions[1]
            questions.append(asked.questions[0])
    assert [len(question.trials) for question in questions[-2:]] == [160, 174]
    assert len({question.seed for question in questions}) == len(questions)
