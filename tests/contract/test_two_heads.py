"""The tasks share and joint, from rows to a folder that predicts: one encoder, or two that are fused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dryfit
import spans
import tiny
import trials
from dryfit.settings.errors import ConfigError
from trials import Undisturbed

OF_BOTH: dict[str, dict[str, Any]] = {
    "train": {"epochs": 3, "evals_per_epoch": 2, "max_length": 28},
    "optim": {"lr": 5e-3},
    "span": {"doc_stride": 6, "topk": 5},
    "regularization": {"dropout": 0.1},
}
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    # With other windows for each part in each epoch, and with learned weights of the losses.
    "share": {"span": {"negatives": 1.5}, "multitask": {"weighting": "uncertainty", "criteria_share": 0.5}},
    "joint": {"joint": {"fusion": "attention", "share_ratio": 0.5, "criterion_length": 8}},
}
STEPS = {"share": 7, "joint": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def trial_in(folder: Path, model: Path, task: str, **tables: dict[str, Any]) -> trials.Trial:
    study = {"task": task, "metric": "combined"}
    settings = trials.merged(OF_BOTH, TABLES[task], tables)
    return trials.Trial(folder, encoder=model, data=spans.both_data(folder / "data"), study=study, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], Undisturbed]:
    """A trial of each task, run when it is first asked for."""
    found: dict[str, Undisturbed] = {}

    def of(task: str) -> Undisturbed:
        if task not in found:
            found[task] = trials.undisturbed(trial_in(tmp_path_factory.mktemp(task), model, task))
        return found[task]

    return of


@pytest.mark.parametrize("task", TABLES)
def test_it_learns_both(whole: Callable[[str], Undisturbed], task: str) -> None:
    trial, _, points = whole(task)
    assert points[-1].metrics["loss"] < points[0].metrics["loss"]
    for point in points:
        found = point.metrics
        assert found["combined"] == pytest.approx((found["f1_macro"] + found["token_f1"]) / 2, abs=1e-12)
    facts = json.loads((trial.folder / "best" / "dryfit.json").read_text("utf-8"))
    assert "null_threshold" in facts["input"]["fitted"]


def test_weights_of_the_losses_are_learned(whole: Callable[[str], Undisturbed]) -> None:
    assert whole("share").trial.best_weights()["head.log_variances"].abs().min() > 0


@pytest.mark.parametrize(
    ("task", "step"),
    [*STEPS.items(), *(pytest.param(task, 1, marks=pytest.mark.slow) for task in STEPS)],
)
def test_a_stopped_trial_goes_on_bit_for_bit(
    tmp_path: Path, model: Path, whole: Callable[[str], Undisturbed], task: str, step: int
) -> None:
    trials.assert_goes_on(trial_in(tmp_path, model, task), whole(task), step)


@pytest.mark.parametrize("task", TABLES)
def test_what_the_best_weights_predict_scores_as_they_did(whole: Callable[[str], Undisturbed], task: str) -> None:
    """From the folder alone, with the tokenizer of criteria that is kept there."""
    spans.assert_predicts_as_validated(whole(task).trial)


def test_shared_layers_are_saved_once_and_one_again_when_loaded(whole: Callable[[str], Undisturbed]) -> None:
    trial = whole("joint").trial
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
    trial = trial_in(tmp_path, model, "joint", **tables)
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
        trial_in(tmp_path, tiny.model(tmp_path / "m", architecture), "joint", joint=joint).run()
    assert found in caught.value.found
