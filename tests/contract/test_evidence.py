"""The task evidence, from rows to a folder that predicts: windows, decoding, a fitted threshold, going on."""

import json
from pathlib import Path

import pytest
import torch

import spans
import tiny
import trials
from dryfit.core.jobs import StopReason

TABLES = {
    "train": {"epochs": 3, "evals_per_epoch": 2, "max_length": 28},
    "optim": {"lr": 5e-3},
    "span": {"doc_stride": 6, "topk": 5, "negatives": 1.5},
    "regularization": {"dropout": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def trial_in(folder: Path, model: Path, **tables) -> trials.Trial:
    study = {"task": "evidence", "metric": "token_f1"} | tables.pop("study", {})
    merged = {name: TABLES.get(name, {}) | tables.get(name, {}) for name in TABLES.keys() | tables.keys()}
    return trials.Trial(folder, encoder=model, data=spans.evidence_data(folder / "data"), study=study, **merged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path):
    trial = trial_in(tmp_path_factory.mktemp("whole"), model)
    result, channel = trial.run()
    return trial, result, channel.points


def test_it_learns_where_the_evidence_is(whole) -> None:
    trial, result, points = whole
    print([(p.metrics) for p in points], result)
    facts = json.loads((trial.folder / "best" / "dryfit.json").read_text("utf-8"))
    print(facts)


@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path: Path, model: Path, whole, step: int) -> None:
    """With other windows without a span in each epoch."""
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
