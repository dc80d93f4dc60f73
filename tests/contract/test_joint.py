"""The task joint, from rows to a folder that predicts: two encoders, fused, with layers of their own or shared."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dryfit
import spans
import tiny
import trials
from dryfit.core.errors import ConfigError
from dryfit.core.jobs import StopReason

TABLES: dict[str, dict[str, Any]] = {
    "train": {"epochs": 3, "evals_per_epoch": 2, "max_length": 28},
    "optim": {"lr": 5e-3},
    "span": {"doc_stride": 6, "topk": 5},
    "joint": {"fusion": "attention", "share_ratio": 0.5, "criterion_length": 8},
    "regularization": {"dropout": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def trial_in(folder: Path, model: Path, **tables: dict[str, Any]) -> trials.Trial:
    study = {"task": "joint", "metric": "combined"} | tables.pop("study", {})
    merged = {name: TABLES.get(name, {}) | tables.get(name, {}) for name in TABLES.keys() | tables.keys()}
    return trials.Trial(folder, encoder=model, data=spans.both_data(folder / "data"), study=study, **merged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path):
    trial = trial_in(tmp_path_factory.mktemp("whole"), model)
    result, channel = trial.run()
    return trial, result, channel.points


def test_it_learns_both(whole) -> None:
    _, _, points = whole
    assert points[-1].metrics["loss"] < points[0].metrics["loss"]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path: Path, model: Path, whole, step: int) -> None:
    trial, result, points = whole
    parts = trial_in(tmp_path, model)
    first, before = parts.run(stop_at=step)
    assert (first.stopped_by, first.steps) == (StopReason.REQUEST, step)
    second, after = parts.run()
    assert before.points + after.points == points
    assert second == result
    have, want = parts.best_weights(), trial.best_weights()
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)


def test_what_the_best_weights_predict_scores_as_they_did(whole) -> None:
    """From the folder alone, with the tokenizer of criteria that is kept there."""
    spans.assert_predicts_as_validated(whole[0])


def test_shared_layers_are_saved_once_and_one_again_when_loaded(whole) -> None:
    trial, _, _ = whole
    best = trial.folder / "best"
    saved = trial.best_weights()
    loaded = dryfit.load(best)
    of_criteria = [name for name in saved if name.startswith("encoder_of_criteria.")]
    # Half of two layers: the embeddings and the first layer are the text encoder's own.
    assert of_criteria
    assert not [name for name in of_criteria if ".embeddings." in name or ".layer.0." in name]
    text, criteria = (dict(loaded.get_submodule(path).named_parameters()) for path in loaded.encoder_paths)
    shared = {name for name in text if text[name] is criteria[name]}
    assert shared == {name for name in text if name.startswith(("embeddings.", "encoder.layer.0."))}
    state = loaded.state_dict()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert all(torch.equal(state[f"encoder_of_criteria.{name}"], state[f"encoder.{name}"]) for name in shared)
    assert not any(torch.equal(text[name], criteria[name]) for name in text if name not in shared)
    assert (best / "criteria" / "config.json").is_file()
    assert (best / "criteria" / "tokenizer.json").is_file()


def test_encoders_may_differ(tmp_path: Path, model: Path) -> None:
    """In width, architecture and tokenizer."""
    other = tiny.model(tmp_path / "other", "distilbert", dim=48, hidden_dim=64)
    tables = {"joint": {"criteria_model": str(other), "share_ratio": 0.0, "fusion": "gate"}, "train": {"epochs": 1}}
    trial = trial_in(tmp_path, model, **tables)
    trial.run()
    spans.assert_predicts_as_validated(trial)
    loaded = dryfit.load(trial.folder / "best")
    assert [one.config.model_type for one in loaded.pretrained().values()] == ["bert", "distilbert"]
    assert loaded.get_submodule("fusion.project").weight.shape == (32, 48)


@pytest.mark.parametrize(
    ("architecture", "joint", "found"),
    [
        ("bert", {"criteria_model": "minilm"}, "no effect"),
        ("albert", {}, "albert has no list of 2 layers"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, architecture: str, joint: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trial_in(tmp_path, tiny.model(tmp_path / "m", architecture), joint=joint).run()
    assert found in caught.value.found
