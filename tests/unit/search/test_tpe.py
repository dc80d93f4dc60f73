"""Until its window is full, TPE suggests what Optuna's own TPE does on a study that has every trial."""

import json
import random

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import NSGAIISampler
from optuna.trial import FrozenTrial, TrialState

from dryfit.ledger.state import History
from dryfit.search.samplers import SamplerInput, nsga2_parents, suggest
from dryfit.search.space import Distribution, Space, from_text, into_range
from dryfit.settings.choices import Direction
from dryfit.settings.splits import derive_seed
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import MetricPoint, Outcome, Scalar, TrialRecord

SPACE = Space.from_config(
    StudyConfig.model_validate_json(
        json.dumps(
            {
                "space": {
                    "optim.lr": {"low": 1e-6, "high": 1e-3, "log": True},
                    "head.layers": {"low": 0, "high": 3},
                    "head.dropout": {"low": 0.0, "high": 0.5, "step": 0.1},
                    "sched.name": ["linear", "cosine", "constant"],
                    "head.hidden": {"choices": [128, 256, 512], "when": {"head.layers": [1, 2, 3]}},
                }
            }
        )
    )
)
STATES = {
    Outcome.COMPLETE: TrialState.COMPLETE,
    Outcome.PRUNED: TrialState.PRUNED,
    Outcome.REFUSED: TrialState.PRUNED,
    None: TrialState.RUNNING,
}
SEED = 5


def history(goals: int, *, running: int) -> list[TrialRecord]:
    """Sixty trials at random points with every end that TPE is told of, and some that run."""
    draw = random.Random(goals)
    found: list[TrialRecord] = []
    for number in range(60 + running):
        at_random = SearchSettings(startup_trials=1000)
        drawn = suggest(
            SPACE, found, search=at_random, directions=(Direction.MAXIMIZE,), points=(), seed=3, number=number
        )
        ends = [Outcome.COMPLETE, Outcome.COMPLETE, Outcome.PRUNED, Outcome.REFUSED]
        outcome = draw.choice(ends) if number < 60 else None
        complete = outcome is Outcome.COMPLETE
        reports = (MetricPoint(0, 10, 0.5, draw.random(), {}),) if outcome is Outcome.PRUNED else ()
        found.append(
            TrialRecord(
                number, drawn.internal, drawn.distributions, outcome, draw.random() if complete else None, reports,
                also=tuple(draw.random() for _ in range(goals - 1)) if complete else (),
            )
        )  # fmt: skip
    return found


def optunas_own(told: list[TrialRecord], goals: int) -> dict[str, Scalar]:
    """What Optuna's sampler draws, group after group, with a study in its own storage."""
    storage = optuna.storages.InMemoryStorage()
    directions = [optuna.study.StudyDirection.MAXIMIZE] * goals
    study_id = storage.create_new_study(directions, "theirs")
    for one in told:
        reports = {point.n: point.value for point in one.reports} if goals == 1 else {}
        trial = FrozenTrial(
            one.number, STATES[one.outcome], None, None, None, dict(one.params),
            {name: from_text(text) for name, text in one.distributions.items()}, {}, {}, reports, -1, values=one.values,
        )  # fmt: skip
        storage.create_new_trial(study_id, trial)
    asked = storage.get_trial(storage.create_new_trial(study_id))
    study = optuna.load_study(study_name="theirs", storage=storage)
    sampler = optuna.samplers.TPESampler(
        seed=derive_seed(SEED, "suggest", len(told)), multivariate=True, n_startup_trials=0,
        constant_liar=any(one.outcome is None for one in told),
    )  # fmt: skip
    drawn: dict[str, Scalar] = {}
    for group in SPACE.groups:
        if group[0].applies(drawn):
            free: dict[str, Distribution] = {param.internal: param.distribution for param in group}
            drawn |= {
                name: into_range(free[name], value)
                for name, value in sampler.sample_relative(study, asked, dict(free)).items()
            }
    return drawn


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("running", [0, 3])
@pytest.mark.parametrize("goals", [1, 2])
def test_it_is_optunas_own(goals: int, running: int) -> None:
    told = history(goals, running=running)
    assert {one.outcome for one in told} == {*STATES} - ({None} if not running else set())
    ours = suggest(
        SPACE, told, search=SearchSettings(startup_trials=10), directions=(Direction.MAXIMIZE,) * goals, points=(),
        seed=SEED, number=len(told),
    )  # fmt: skip
    assert ours.internal == optunas_own(told, goals)


# ---- NSGA-II: the parents are those that one study of Optuna, alive all along, would have

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
