"""Until its window is full, TPE suggests what Optuna's own TPE does on a study that has every trial."""

import json
import random

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from dryfit.search.samplers import suggest
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
