"""The task share, from rows to a folder that predicts: two heads on one encoder, stopped and going on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import spans
import tiny
import trials
from dryfit.core.jobs import StopReason

TABLES: dict[str, dict[str, Any]] = {
    "train": {"epochs": 3, "evals_per_epoch": 2, "max_length": 28},
    "optim": {"lr": 5e-3},
    "span": {"doc_stride": 6, "topk": 5, "negatives": 1.5},
    "multitask": {"weighting": "uncertainty", "criteria_share": 0.5},
    "regularization": {"dropout": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def trial_in(folder: Path, model: Path, **tables: dict[str, Any]) -> trials.Trial:
    study = {"task": "share", "metric": "combined"} | tables.pop("study", {})
    merged = {name: TABLES.get(name, {}) | tables.get(name, {}) for name in TABLES.keys() | tables.keys()}
    return trials.Trial(folder, encoder=model, data=spans.both_data(folder / "data"), study=study, **merged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path):
    trial = trial_in(tmp_path_factory.mktemp("whole"), model)
    result, channel = trial.run()
    return trial, result, channel.points


def test_it_learns_both(whole) -> None:
    trial, _, points = whole
    assert points[-1].metrics["loss"] < points[0].metrics["loss"]
    for point in points:
        found = point.metrics
        assert found["combined"] == pytest.approx((found["f1_macro"] + found["token_f1"]) / 2, abs=1e-12)
    weights = trial.best_weights()
    assert weights["head.log_variances"].abs().min() > 0
    facts = json.loads((trial.folder / "best" / "dryfit.json").read_text("utf-8"))
    assert "null_threshold" in facts["input"]["fitted"]


def test_what_the_best_weights_predict_scores_as_they_did(whole) -> None:
    spans.assert_predicts_as_validated(whole[0])


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path: Path, model: Path, whole, step: int) -> None:
    """With other windows for each part in each epoch, and with learned weights of the losses."""
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
