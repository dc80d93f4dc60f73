"""NSGA-II: the parents are those that one Optuna study, alive all along, would have."""

import json
import random

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import NSGAIISampler

from dryfit.ledger.state import History
from dryfit.search.samplers import SamplerInput, nsga2_parents, suggest
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import Outcome, TrialRecord

SIZE = 4


pytestmark = pytest.mark.usefixtures("quiet_optuna")


def space(table: dict[str, object]) -> Space:
    return Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": table})))


def settings() -> SearchSettings:
    return SearchSettings.model_validate_json(json.dumps({"sampler": "nsga2", "population_size": SIZE}))


@pytest.mark.parametrize("goals", [1, 2, 3])
def test_the_parents_are_those_of_a_study_that_lives_all_along(goals: int) -> None:
    draw = random.Random(goals)
    directions = (Direction.MAXIMIZE, Direction.MINIMIZE, Direction.MAXIMIZE)[:goals]
    sampler = NSGAIISampler(population_size=SIZE, seed=0)
    study = optuna.create_study(directions=[one.value for one in directions], sampler=sampler)
    made = space({"optim.lr": {"low": 0.1, "high": 1.0}})
    past = History()
    for number in range(6 * SIZE):
        asked = SamplerInput(made, past, settings(), directions, 0, number)
        trial = study.ask({"optim.lr": FloatDistribution(0.1, 1.0)})
        attrs = study.get_trials(deepcopy=False)[number].system_attrs
        generation = attrs["NSGAIISampler:generation"]
        expected = sorted(one.number for one in sampler.get_parent_population(study, generation))
        assert [one.number for one in nsga2_parents(asked)] == expected
        values = tuple(draw.choice([draw.random(), 0.5]) for _ in range(goals))
        study.tell(trial, list(values))
        past.put(TrialRecord(number, trial.params, {}, Outcome.COMPLETE, values[0], also=values[1:]))
    assert len({one.number for one in nsga2_parents(SamplerInput(made, past, settings(), directions, 0, 99))}) == SIZE


def test_what_depends_on_a_choice_is_inherited_from_parents_that_made_it() -> None:
    sizes = [{"low": 1, "high": 512, "when": {"model.name": "a"}}, {"choices": [1000], "when": {"model.name": "b"}}]
    made = space({"model.name": ["a", "b"], "train.batch_size": sizes})
    history = [
        TrialRecord(n, {"model.name": "a", "train.batch_size#0": 100 + n}, {}, Outcome.COMPLETE, float(n))
        for n in range(SIZE)
    ]
    children = [
        suggest(made, history, search=settings(), directions=(Direction.MAXIMIZE,), points=(), seed=0, number=SIZE + n)
        for n in range(40)
    ]
    batches = [one.params["train.batch_size"] for one in children if one.params["model.name"] == "a"]
    inherited = [batch for batch in batches if isinstance(batch, int) and 100 <= batch < 100 + SIZE]
    assert len(batches) > 20
    assert len(inherited) > len(batches) / 3  # the rest are mutations, one of two values each
    assert {type(value) for one in children for value in one.params.values()} == {str, int}


def test_only_complete_trials_make_a_generation() -> None:
    made = space({"optim.lr": {"low": 0.1, "high": 1.0}})

    def parents(*outcomes: Outcome) -> list[int]:
        history = [
            TrialRecord(number, {"optim.lr": 0.5}, {}, outcome, 1.0 if outcome is Outcome.COMPLETE else None)
            for number, outcome in enumerate(outcomes)
        ]
        asked = SamplerInput(made, History(history), settings(), (Direction.MAXIMIZE,), 0, len(history))
        return [one.number for one in nsga2_parents(asked)]

    done, pruned = Outcome.COMPLETE, Outcome.PRUNED
    assert parents(done, done, pruned, done) == []
    assert parents(done, done, pruned, done, done) == [0, 1, 3, 4]


def test_a_trial_that_ends_late_changes_the_generations_from_its_own_on() -> None:
    made, draw = space({"optim.lr": {"low": 0.1, "high": 1.0}}), random.Random(1)
    ended = [
        TrialRecord(n, {"optim.lr": 0.5}, {}, Outcome.COMPLETE, draw.random(), also=(draw.random(),))
        for n in range(5 * SIZE)
    ]
    directions = (Direction.MINIMIZE, Direction.MINIMIZE)

    def parents(past: History) -> list[int]:
        return [one.number for one in nsga2_parents(SamplerInput(made, past, settings(), directions, 0, 99))]

    past = History(TrialRecord(n, {"optim.lr": 0.5}, {}) for n in range(5 * SIZE))
    seen: list[TrialRecord] = []
    for record in draw.sample(ended, len(ended)):
        past.put(record)
        seen.append(record)
        assert parents(past) == parents(History(seen))
    assert len(parents(past)) == SIZE
