"""Rows with any number of classes, from the file to the folder that anyone can load; and pooling with weights."""

import json
from pathlib import Path

import pytest
import torch

import dryfit
import tasks
import tiny
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import DataSettings
from dryfit.settings.task_facts import metrics_of_classes
from dryfit.tasks.base import pad_rows
from dryfit.tasks.metrics import multi_label_metrics
from dryfit.tasks.prepare import prepared_tokens

TABLES = {"optim": {"lr": 1e-2}, "head": {"pooling": "attention", "layers": 1, "activation": "silu"}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> trials.Trial:
    folder = tmp_path_factory.mktemp("trained")
    trial = trials.Trial(folder, encoder=encoder, data=tiny.multi_label_data(folder / "data"), **TABLES)
    result, channel = trial.run()
    assert result.value == min(point.metrics["loss"] for point in channel.points)
    assert set(channel.points[0].metrics) == set(metrics_of_classes(DataSettings(num_labels=3, multi_label=True)))
    return trial


def test_counts_are_of_each_class(trained: trials.Trial) -> None:
    rows = [json.loads(line) for line in Path(trained.data.train or "").read_text("utf-8").splitlines()]
    want = {label: sum(label in row["label"] for row in rows) for label in range(3)}
    assert trained.resolve().splits["train"].label_counts == want
    assert sum(want.values()) != len(rows)
    assert [] in [row["label"] for row in rows]


def test_the_best_weights_load_and_score_as_they_did(trained: trials.Trial) -> None:
    """By ``dryfit.load`` alone: encoder, attention pooling and head, in the trial's own validation order."""
    model = dryfit.load(trained.folder / "best")
    assert model.spec.multi_label
    names = {name for name, _ in model.named_parameters() if name.startswith("head.0.")}
    assert names == {"head.0.project.weight", "head.0.project.bias", "head.0.query.weight"}
    tokens = prepared_tokens(
        tasks.reading(trained.data, trained.settings.model, trained.settings.train.max_length),
        cache_dir=trained.folder / "cache",
        data_fingerprint=trained.resolve().data_fingerprint,
        only=("validation",),
    )
    split = tokens.splits["validation"]
    with torch.inference_mode():
        outputs = model(**pad_rows(split, range(len(split)), pad_id=tokens.pad_id))
    facts = json.loads((trained.folder / "best" / "dryfit.json").read_text("utf-8"))
    found = multi_label_metrics(outputs, split.labels_R)
    assert found["loss"] == pytest.approx(facts["value"], rel=1e-5)
    assert found["auroc"] == pytest.approx(facts["metrics"]["auroc"], rel=1e-5)


@pytest.mark.slow
def test_every_class_of_a_row_is_predicted_for_itself(trained: trials.Trial, tmp_path: Path) -> None:
    """In a process of its own; one row at a time by ``dryfit.load`` gives the same."""
    rows = tiny.several_labels(13, seed=7, start=800)
    source, out = tiny.write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    done = dryfit.predict(trained.folder / "best", source, out, batch=4)
    assert (done.rows, done.bad) == (13, 0)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    model, tokenizer = dryfit.load(trained.folder / "best"), load_tokenizer(FolderSource(str(trained.folder / "best")))
    expected: list[torch.Tensor] = []
    for row in rows:
        tokens = tokenizer(row["criterion"], row["text"], truncation="only_second", max_length=32, return_tensors="pt")
        with torch.inference_mode():
            expected.append(model(**tokens).double().sigmoid()[0])
    found = torch.tensor([line["probabilities"] for line in lines], dtype=torch.float64)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-6)
    assert [line["label"] for line in lines] == [(row >= 0.5).nonzero().flatten().tolist() for row in found]
    assert len({len(line["label"]) for line in lines}) > 1  # not the same number of classes for every row


def test_a_folder_that_does_not_say_it_has_one_class_a_row(tmp_path: Path, encoder: Path) -> None:
    """Those that were saved before there was another kind."""
    trial = trials.small(tmp_path, encoder=encoder)
    trial.run()
    head = trial.settings.head.model_dump(mode="json")
    facts = {"format": 1, "head": head, "num_outputs": 2, "cls_last": False}
    (tmp_path / "best" / "dryfit.json").write_text(json.dumps(facts), encoding="utf-8")
    assert dryfit.load(tmp_path / "best").spec.multi_label is False


def test_micro_batches_learn_the_same(tmp_path: Path, encoder: Path) -> None:
    """With weights that differ from row to row, up to fp32's rounding."""
    found = []
    for rows in (8, 3):
        tables = {"loss": {"name": "focal", "alpha": 0.3, "class_balance": "effective"}, "head": {"dropout": 0.0}}
        still = {"regularization": {"dropout": 0.0, "attention_dropout": 0.0}, "execution": {"micro_batch": rows}}
        folder = tmp_path / str(rows)
        data = tiny.multi_label_data(folder / "data")
        found.append(trials.Trial(folder, encoder=encoder, data=data, **tables, **still).run()[1].points)
    losses = [[point.metrics["loss"] for point in points] for points in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "metric", sorted(set(Metric) - set(metrics_of_classes(DataSettings(num_labels=3, multi_label=True))))
)
def test_a_metric_of_one_guess_for_each_row_is_refused(tmp_path: Path, encoder: Path, metric: Metric) -> None:
    data = tiny.multi_label_data(tmp_path / "data")
    with pytest.raises(ConfigError, match=f"{metric} with 3 classes, any number of them to a row"):
        trials.Trial(tmp_path, encoder=encoder, data=data, study={"metric": metric}).run()


@pytest.mark.parametrize("metric", ["auroc", "ece"])
def test_trials_can_be_judged_by_ranking_and_calibration(tmp_path: Path, encoder: Path, metric: str) -> None:
    result, channel = trials.small(tmp_path, encoder=encoder, study={"metric": metric}).run()
    values = [point.metrics[metric] for point in channel.points]
    assert result.value == (min if metric == "ece" else max)(values)
    assert 0 <= min(values) <= max(values) <= 1
