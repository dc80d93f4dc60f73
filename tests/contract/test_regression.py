"""A label that is a number: trained, measured, saved, predicted and exported as transformers' own regression is."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import mean_absolute_error, mean_squared_error
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dryfit
import tiny
import trials
from dryfit.settings.errors import DataError
from dryfit.settings.training_messages import ExportRequest
from dryfit.tasks.analysis import analyse
from dryfit.tasks.scored_rows import read_rows
from dryfit.training.export import export

OWN_HEAD = {"pooling": "cls", "layers": 1, "activation": "tanh"}


def numbered(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    """Rows whose label falls with the length of the text, and is no whole number."""
    rng = random.Random(start)
    rows = tiny.rows(count, start=start)
    for row in rows:
        row["label"] = round(1.5 - len(row["text"].split()) / 12 + rng.uniform(-0.05, 0.05), 3)
    return rows


def data_of(folder: Path) -> dict[str, Any]:
    train, validation = numbered(80), numbered(24, start=80)
    return {
        "train": str(tiny.write_jsonl(folder / "train.jsonl", train)),
        "validation": str(tiny.write_jsonl(folder / "validation.jsonl", validation)),
        "num_labels": 1,
    }


def trial_in(folder: Path, **tables: dict[str, Any]) -> trials.Trial:
    encoder = tiny.model(folder / "encoder")
    width = json.loads((encoder / "config.json").read_text())["hidden_size"]
    usual = {"study": {"metric": "mse", "direction": "minimize"}, "head": OWN_HEAD | {"hidden": width}}
    return trials.Trial(folder, encoder=encoder, data=data_of(folder / "data"), **trials.merged(usual, tables))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[trials.Trial, dict[str, float]]:
    """A trial that has learned something, and its metrics of the best validation."""
    trial = trial_in(tmp_path_factory.mktemp("numbers"), train={"epochs": 6})
    result, channel = trial.run()
    best = channel.points[result.best or 0]
    assert best.metrics["mse"] == result.value and not best.collapsed
    return trial, dict(best.metrics)


def test_it_learns_and_its_metrics_are_those_of_its_predictions(trained: Any, tmp_path: Path) -> None:
    trial, metrics = trained
    rows = trials.read_lines(trial.data.validation)
    _, lines = trials.predicted(trial.folder / "best", str(trial.data.validation), tmp_path / "out.jsonl")
    said, right = [line["value"] for line in lines], [row["label"] for row in rows]
    assert set(lines[0]) == {"row", "id", "value"}
    assert metrics["mse"] == metrics["loss"] == pytest.approx(mean_squared_error(right, said), rel=1e-4)
    assert metrics["mae"] == pytest.approx(mean_absolute_error(right, said), rel=1e-4)
    assert metrics["pearson"] == pytest.approx(stats.pearsonr(right, said).statistic, rel=1e-4)
    assert metrics["spearman"] == pytest.approx(stats.spearmanr(right, said).statistic, abs=1e-3)
    assert metrics["mse"] < 0.7 * np.var(right)


def test_its_scored_rows_are_kept_and_analysed(trained: Any) -> None:
    trial, metrics = trained
    (file,) = [read_rows(path) for path in sorted(trial.layout.scored.glob("*.jsonl.gz"))]
    assert file.metrics["mae"] == pytest.approx(metrics["mae"])
    found = analyse(file.rows, None, split="validation", metric="mse")
    assert found is not None and found.numbers is not None and found.classes is None and found.texts is None
    assert list(found.overall.scores) == ["mse", "mae", "pearson", "spearman"]
    assert found.overall.scores["pearson"] == pytest.approx(metrics["pearson"], rel=1e-6)
    errors = [row.values["mae"] for row in found.numbers.worst]
    assert errors == sorted(errors, key=lambda one: -(one or 0)) and len(errors) == 20


def test_plain_transformers_gives_the_same_numbers(trained: Any, tmp_path: Path) -> None:
    trial, _ = trained
    body = ExportRequest(model_dir=str(trial.folder / "best"), out=str(tmp_path / "plain"), threads=1)
    export(body, trials.ScriptedChannel(tmp_path / "channel"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    rows = trials.read_lines(trial.data.validation)[:6]
    said = dryfit.Predictor(trial.folder / "best", device="cpu")(rows)
    for row, line in zip(rows, said, strict=True):
        inputs = tokenizer(row["criterion"], row["text"], truncation="only_second", max_length=32, return_tensors="pt")
        with torch.no_grad():
            assert model(**inputs).logits.item() == pytest.approx(line["value"], abs=1e-5)


@pytest.mark.parametrize(
    ("label", "found"),
    [
        ("3.5", "label is '3.5', not a number"),
        (True, "label is True, not a number"),
        (None, "label is None, not a number"),
        ([1.0], "not a number"),
        (1e39, "label is 1e+39"),
        (10**400, "label is 1"),
    ],
)
def test_a_label_that_is_no_number_is_refused_with_its_row(tmp_path: Path, label: object, found: str) -> None:
    trial = trial_in(tmp_path)
    rows = [*numbered(4), numbered(1, start=4)[0] | {"label": label}]
    tiny.write_jsonl(Path(str(trial.data.train)), rows)
    with pytest.raises(DataError, match="line 5") as caught:
        trial.resolve()
    assert found in caught.value.found


@pytest.mark.parametrize("cell", ["nan", "inf", "-Infinity", "", "1_000", "abc", "1,5"])
def test_a_cell_that_is_no_number_is_refused_with_its_row(tmp_path: Path, cell: str) -> None:
    trial = trial_in(tmp_path)
    lines = [f"{row['id']},{row['criterion']},{row['text']},{row['label']},g{row['id']}" for row in numbered(3)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["id,criterion,text,label,group", *lines, f'x,c,some text,"{cell}",gx', ""]))
    trial.data = trial.data.model_copy(update={"train": str(path)})
    with pytest.raises(DataError, match="line 5.*not a number"):
        trial.resolve()


def test_numbers_far_from_nought_are_remarked_upon(tmp_path: Path) -> None:
    trial = trial_in(tmp_path)
    tiny.write_jsonl(Path(str(trial.data.train)), [row | {"label": 900 + at} for at, row in enumerate(numbered(9))])
    assert "labels have the mean 904" in "".join(trial.resolve().remarks)


def test_a_rate_of_nought_collapses(tmp_path: Path) -> None:
    trial = trial_in(tmp_path, train={"epochs": 1}, head={"pooling": "mean"}, optim={"lr": 1e-12})
    trial.data = trial.data.model_copy(
        update={"validation": str(tiny.write_jsonl(tmp_path / "far.jsonl", _far(numbered(12, start=80))))}
    )
    _, channel = trial.run()
    said = channel.points[-1].collapsed
    assert said.startswith("every row is answered with") and said.endswith("or nearly")
    assert math.isfinite(channel.points[-1].metrics["mse"])


def _far(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose labels differ by far more than a fresh head's numbers."""
    return [row | {"label": 500.0 * at} for at, row in enumerate(rows)]
