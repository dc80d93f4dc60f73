"""QMC: one low-discrepancy sequence over the whole study, though nothing lives between two trials."""

import json
from collections import Counter

import numpy as np
import pytest
from scipy.stats import qmc

from dryfit.search.samplers import Suggestion, suggest
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.splits import derive_seed
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.trial import Scalar, TrialRecord

BOX = {"optim.weight_decay": {"low": 0.0, "high": 1.0}, "head.dropout": {"low": 0.0, "high": 0.5}}
SEED = 3


def space(table: dict[str, object]) -> Space:
    return Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": table})))


def ask(made: Space, number: int, history: list[TrialRecord] | None = None, sequence: str = "sobol") -> Suggestion:
    search = SearchSettings.model_validate_json(json.dumps({"sampler": "qmc", "qmc_sequence": sequence}))
    return suggest(
        made, history or [], search=search, directions=(Direction.MAXIMIZE,), points=(), seed=SEED, number=number
    )


@pytest.mark.parametrize(("sequence", "engine"), [("sobol", qmc.Sobol), ("halton", qmc.Halton)])
def test_the_trials_are_the_points_of_one_scrambled_sequence(sequence: str, engine: type[qmc.QMCEngine]) -> None:
    made = space(BOX)
    points = np.array(
        [
            [params["head.dropout"] * 2, params["optim.weight_decay"]]  # coordinates go by name
            for params in (ask(made, number, sequence=sequence).params for number in range(32))
        ],
        dtype=float,
    )
    expected = engine(2, scramble=True, seed=derive_seed(SEED, "qmc")).random(32)
    np.testing.assert_allclose(points, expected, atol=1e-12)
    at_random = np.random.default_rng(0).random((200, 32, 2))
    assert qmc.discrepancy(points) < min(qmc.discrepancy(one) for one in at_random)


def test_every_trial_has_a_point_of_its_own_whatever_runs_beside_it() -> None:
    made = space(BOX)
    alone = [ask(made, number) for number in range(16)]
    running = [TrialRecord(number, one.internal, one.distributions) for number, one in enumerate(alone)]
    assert [ask(made, number, running[:number]) for number in range(16)] == alone
    assert len({json.dumps(one.params) for one in alone}) == 16


def test_conditions_choices_and_single_values() -> None:
    """2^n trials meet a choice of two halves equally often, and what depends on it is spread within each."""
    sizes = [
        {"low": 1, "high": 16, "when": {"model.name": "a"}},
        {"low": 101, "high": 116, "when": {"model.name": "b"}},
    ]
    made = space({"model.name": ["a", "b"], "train.batch_size": sizes, "optim.lr": [0.1], **BOX})
    params: list[dict[str, Scalar]] = [ask(made, number).params for number in range(32)]
    assert Counter(one["model.name"] for one in params) == {"a": 16, "b": 16}
    assert {one["optim.lr"] for one in params} == {0.1}
    for model, low in (("a", 1), ("b", 101)):
        drawn = [one["train.batch_size"] for one in params if one["model.name"] == model]
        halves = Counter(isinstance(size, int) and size < low + 8 for size in drawn)
        assert max(halves.values()) <= 10, "a fair coin would often do worse; the sequence may not"
        assert all(isinstance(size, int) and low <= size < low + 16 for size in drawn)


def test_a_space_without_a_choice_has_one_point() -> None:
    assert ask(space({"optim.lr": [0.1]}), 5).params == {"optim.lr": 0.1}
