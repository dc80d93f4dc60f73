"""A fitted threshold of classes, from a trial's validation to what its saved model predicts."""

import json
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

import spans
import tiny
import trials
from dryfit.tasks.saved_models import read_model_input

# By this loss class 1 is hardly ever the likelier one: one half is not the best threshold.
TABLES = {
    "train": {"epochs": 2},
    "optim": {"lr": 3e-3},
    "loss": {"name": "focal", "alpha": 0.1},
    "head": {"threshold": "calibrated"},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> trials.Undisturbed:
    folder = tmp_path_factory.mktemp("whole")
    study = {"metric": "mcc"}
    return trials.undisturbed(
        trials.Trial(folder, encoder=encoder, data=tiny.data(folder / "data"), study=study, **TABLES)
    )


def predicted(folder: Path, rows: str | None, out: Path) -> list[dict[str, Any]]:
    return trials.predicted(folder, rows or "", out)[1]


def test_the_saved_model_decides_by_it_and_scores_as_it_did(whole: trials.Undisturbed, tmp_path: Path) -> None:
    folder = whole.trial.folder / "best"
    facts = json.loads((folder / "dryfit.json").read_text("utf-8"))
    threshold = facts["input"]["fitted"]["class_threshold"]
    said = predicted(folder, whole.trial.data.validation, tmp_path / "out.jsonl")
    truth = [row["label"] for row in trials.read_lines(whole.trial.data.validation)]
    assert [one["label"] for one in said] == [int(one["probabilities"][1] > threshold) for one in said]
    likeliest = [int(one["probabilities"][1] > 0.5) for one in said]
    assert [one["label"] for one in said] != likeliest
    assert facts["metrics"]["mcc"] == pytest.approx(matthews_corrcoef(truth, [one["label"] for one in said]))
    assert facts["metrics"]["mcc"] > matthews_corrcoef(truth, likeliest)


def test_fixed_learns_the_same_and_decides_otherwise(whole: trials.Undisturbed, encoder: Path, tmp_path: Path) -> None:
    tables = trials.merged(TABLES, {"head": {"threshold": "fixed"}})
    fixed = trials.undisturbed(
        trials.Trial(tmp_path, encoder=encoder, data=tiny.data(tmp_path / "data"), study={"metric": "mcc"}, **tables)
    )
    before, after = fixed.points[-1].metrics, whole.points[-1].metrics
    assert (before["loss"], before["auroc"]) == (after["loss"], after["auroc"])
    assert before["mcc"] < after["mcc"]
    assert read_model_input(tmp_path / "best").fitted == {}


@pytest.mark.parametrize("there", [True, False])
def test_with_validation_it_is_the_one_that_validation_chose(
    whole: trials.Undisturbed, tmp_path: Path, there: bool
) -> None:
    """Of the trial's own weights, while they are there; else it is one half, which is told."""
    best = whole.trial.folder / "best"
    _, fitted, notes = trials.with_validation(whole.trial, tmp_path, last_step=2, chosen=best if there else None)
    assert fitted == (read_model_input(best).fitted if there else {})
    told = [text for text in notes if "it is 0.5" in text]
    assert len(told) == (0 if there else 1)
    said = predicted(tmp_path / "model", whole.trial.data.validation, tmp_path / "out.jsonl")
    at = fitted.get("class_threshold", 0.5)
    assert [one["label"] for one in said] == [int(one["probabilities"][1] > at) for one in said]


def test_classes_and_spans_are_both_fitted(encoder: Path, tmp_path: Path) -> None:
    data = spans.both_data(tmp_path / "data", train=16, validation=8, criterion_repeated=5)
    tables = trials.merged(TABLES, {"train": {"max_length": 40}, "span": {"doc_stride": 6}})
    study = {"task": "share", "metric": "combined"}
    trial = trials.Trial(tmp_path, encoder=encoder, data=data, study=study, **tables)
    trial.run()
    facts = json.loads((tmp_path / "best" / "dryfit.json").read_text("utf-8"))
    fitted = facts["input"]["fitted"]
    assert fitted.keys() == {"null_threshold", "class_threshold"}
    said = predicted(tmp_path / "best", trial.data.validation, tmp_path / "out.jsonl")
    assert [one["label"] for one in said] == [int(one["probabilities"][1] > fitted["class_threshold"]) for one in said]
    truth = [row["label"] for row in trials.read_lines(trial.data.validation)]
    found = f1_score(truth, [one["label"] for one in said], average="macro", zero_division=0)
    assert facts["metrics"]["f1_macro"] == pytest.approx(found, abs=1e-12)
