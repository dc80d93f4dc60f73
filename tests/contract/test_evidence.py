"""The task evidence, from rows to a folder that predicts: windows, decoding, a fitted threshold, going on."""

import ast
import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spans
import tiny
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.tables import DataSettings
from dryfit.settings.task_facts import metrics_of_spans
from dryfit.settings.training_messages import FinalRequest, FinalResult
from dryfit.settings.wire import Note
from dryfit.tasks.rows import UnlabelledRow
from dryfit.tasks.saved_models import load, read_model_input
from dryfit.tasks.spans import span_metrics
from dryfit.tasks.windows import Ragged, word_spans
from dryfit.training.prediction import ModelPredictor
from dryfit.training.trial_jobs import final
from trials import read_lines as read

TABLES = {
    "train": {"epochs": 3, "evals_per_epoch": 2, "max_length": 28},
    "optim": {"lr": 5e-3},
    "span": {"doc_stride": 6, "topk": 5, "negatives": 1.5},
    "regularization": {"dropout": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


def trial_in(folder: Path, model: Path, *, rows: dict[str, int] | None = None, **tables: Any) -> trials.Trial:
    data = spans.evidence_data(folder / "data", **(rows or {}))
    study = {"task": "evidence", "metric": "token_f1"}
    return trials.Trial(folder, encoder=model, data=data, study=study, **trials.merged(TABLES, tables))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> trials.Undisturbed:
    return trials.undisturbed(trial_in(tmp_path_factory.mktemp("whole"), model, rows={"test": 20}))


def predicted(folder: Path, rows: list[dict[str, Any]], *, batch_rows: int = 4) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(FolderSource(str(folder)))
    predictor = ModelPredictor(load(folder), tokenizer, read_model_input(folder), batch_rows)
    return list(predictor.predict([UnlabelledRow(row["id"], row["text"], row["criterion"], "") for row in rows]))


def scored(rows: list[dict[str, Any]], said: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics of what was predicted for rows with evidence."""
    answers = np.array([one["span"] or (0, 0) for one in said], dtype=np.int64)
    golds = Ragged.of([np.array(row["evidence"], dtype=np.int32).reshape(-1, 2) for row in rows])
    return span_metrics(answers, golds, Ragged.of([word_spans(row["text"]) for row in rows]))


def assert_same(have: dict[str, float], want: dict[str, float]) -> None:
    for name, value in want.items():
        assert have[name] == pytest.approx(value, abs=1e-9, nan_ok=True), name


def test_it_reports_all_metrics_of_the_task(whole) -> None:
    _, result, points = whole
    assert len(points) == 6
    assert set(points[0].metrics) == set(metrics_of_spans(DataSettings()))
    assert result.value == max(point.metrics["token_f1"] for point in points)
    assert points[-1].metrics["loss"] < points[0].metrics["loss"]


def test_what_the_best_weights_predict_scores_as_they_did(whole) -> None:
    """From the folder alone, the threshold that was fitted with these weights included; whatever the batches."""
    trial, _, _ = whole
    folder = trial.folder / "best"
    facts = json.loads((folder / "dryfit.json").read_text("utf-8"))
    assert math.isfinite(facts["input"]["fitted"]["null_threshold"])
    rows = read(trial.data.validation)
    said = predicted(folder, rows)
    found = scored(rows, said)
    assert_same({**facts["metrics"]}, found)
    for one, row in zip(said, rows, strict=True):
        best = one["candidates"][0]
        without = one["null_score"] - best["score"] > facts["input"]["fitted"]["null_threshold"]
        assert one["span"] == (None if without else best["span"])
        assert one["text"] == (None if without else row["text"][slice(*best["span"])])
    for one, other in zip(said, predicted(folder, rows, batch_rows=16), strict=True):
        assert one["span"] == other["span"]


@pytest.mark.parametrize("metric", ["token_f1", "exact_match", "span_iou"])
def test_no_threshold_is_better_by_the_studys_metric(tmp_path: Path, model: Path, metric: str) -> None:
    """Answers of one token, where evidence is a text of two words: all are right in part, and none wholly."""
    data = spans.evidence_data(tmp_path / "data")
    texts = [f"{word} sad" for word in tiny.WORDS]
    golds = [[[0, len(text)]] if number % 3 else [] for number, text in enumerate(texts)]
    rows = [
        {"id": f"s{number}", "criterion": "feel sad", "text": text, "evidence": gold}
        for number, (text, gold) in enumerate(zip(texts, golds, strict=True))
    ]
    tiny.write_jsonl(Path(data["validation"]), rows)
    study, own = {"task": "evidence", "metric": metric}, {"span": {"max_answer_len": 1}, "train": {"epochs": 1}}
    trial = trials.Trial(tmp_path, encoder=model, data=data, study=study, **trials.merged(TABLES, own))
    trial.run()
    said = predicted(tmp_path / "best", rows)
    differences = [one["null_score"] - one["score"] if one["candidates"] else math.inf for one in said]
    edges = np.unique([one for one in differences if one < math.inf])
    values = []
    for threshold in [edges[0] - 1, *((edges[1:] + edges[:-1]) / 2), edges[-1] + 1]:
        answered = [
            {"span": one["candidates"][0]["span"] if difference <= threshold else None}
            for one, difference in zip(said, differences, strict=True)
        ]
        values.append(scored(rows, answered)[metric])
    assert scored(rows, said)[metric] == pytest.approx(max(values), abs=1e-9)
    assert max(values) > min(values)


@pytest.mark.parametrize("step", [5, 7])
def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path: Path, model: Path, whole, step: int) -> None:
    """With other windows without a span in each epoch."""
    trials.assert_goes_on(trial_in(tmp_path, model, rows={"test": 20}), whole, step)


@pytest.fixture(scope="module")
def once_more(whole):
    """The trial's configuration trained once more, and evaluated on test."""
    trial, _, _ = whole
    own = trial.folder / "final"
    training, model = trials.alone(trial.request(), own), str(own / "model")
    request = FinalRequest(training=training, model_dir=model, attempt_model_dir=model, study="s")
    done = final(request, trials.ScriptedChannel(own))
    assert isinstance(done, FinalResult)
    return done, own / "model"


def test_test_rows_are_judged_by_the_threshold_of_validation(whole, once_more) -> None:
    trial, _, _ = whole
    done, folder = once_more
    best = json.loads((trial.folder / "best" / "dryfit.json").read_text("utf-8"))
    assert read_model_input(folder).fitted == best["input"]["fitted"]
    assert done.validation == best["metrics"]
    rows = read(trial.data.test)
    assert done.test is not None
    assert_same(done.test, scored(rows, predicted(folder, rows)))
    assert done.rows == {"train": 24, "validation": 16, "test": 20, "trained": 24}


@pytest.mark.parametrize("there", [True, False])
def test_with_validation_the_threshold_is_the_one_that_validation_chose(whole, tmp_path: Path, there: bool) -> None:
    """Of the trial's own weights, while they are there; else it is 0, which is told."""
    trial, _, _ = whole
    best = trial.folder / "best"
    done, fitted, notes = trials.with_validation(trial, tmp_path, last_step=3, chosen=best if there else None)
    assert fitted == (read_model_input(best).fitted if there else {})
    told = [text for text in notes if "threshold of null" in text]
    assert len(told) == (0 if there else 1) and done.test is not None
    rows = read(trial.data.test)
    said = predicted(tmp_path / "model", rows)
    assert_same(done.test, scored(rows, said))
    at = fitted.get("null_threshold", 0.0)
    for one in said:
        assert (one["span"] is None) == (one["null_score"] - one["candidates"][0]["score"] > at)


def test_the_folder_says_what_it_is_and_opens_without_dryfit(once_more, capsys, monkeypatch) -> None:
    _, folder = once_more
    card = (folder / "README.md").read_text("utf-8")
    assert "pipeline_tag: question-answering" in card
    assert "in windows of 28 tokens of which two share 6 of the text" in card
    monkeypatch.chdir(folder)
    runpy.run_path("example.py")
    printed = ast.literal_eval(capsys.readouterr().out)
    row = {"id": "a", "criterion": "a criterion", "text": "A text."}
    (said,) = predicted(folder, [row])
    assert said["candidates"][0]["span"] == list(printed["span"])
    assert said["candidates"][0]["score"] == pytest.approx(printed["score"], abs=1e-4)
    assert said["null_score"] == pytest.approx(printed["null_score"], abs=1e-4)


def test_rows_without_room_for_a_next_window_have_lines_of_their_own(whole, tmp_path: Path) -> None:
    trial, _, _ = whole
    rows = [
        {"id": "a", "criterion": "feel sad", "text": "i feel sad " * 30},
        {"id": "b", "criterion": "feel " * 20, "text": "i feel sad"},
        {"id": "c", "criterion": "sleep bad", "text": "we sleep bad"},
    ]
    source = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    done, lines = trials.predicted(trial.folder / "best", source, tmp_path / "out.jsonl")
    assert (done.rows, done.bad) == (3, 1)
    assert [line["id"] for line in lines] == ["a", "b", "c"]
    assert "has 20 tokens" in lines[1]["error"]
    for row, line in ((rows[0], lines[0]), (rows[2], lines[2])):
        assert line["text"] is None or line["text"] == row["text"][slice(*line["span"])]
        assert line["candidates"] and line["score"] == line["candidates"][0]["score"]


def test_rows_of_which_nothing_can_be_learned_are_refused(tmp_path: Path, model: Path) -> None:
    trial = trial_in(tmp_path, model)
    rows = read(trial.data.train)
    tiny.write_jsonl(Path(trial.data.train or ""), [row | {"evidence": []} for row in rows])
    with pytest.raises(DataError, match="none of its 24 rows has any evidence"):
        trial.resolve()
    rows[3] |= {"text": "i sleep", "evidence": [[1, 2]]}
    tiny.write_jsonl(Path(trial.data.train or ""), [rows[3]])
    with pytest.raises(DataError, match="none of its 1 rows has any evidence"):
        trial.resolve()
    tiny.write_jsonl(Path(trial.data.train or ""), rows)
    assert "train: 1 rows have spans of white space alone, which are read as none" in trial.resolve().remarks
    del rows[3]["evidence"]
    tiny.write_jsonl(Path(trial.data.train or ""), rows)
    with pytest.raises(DataError, match="column 'evidence' is missing"):
        trial.resolve()


def test_evidence_that_fits_no_window_is_told(tmp_path: Path, model: Path) -> None:
    trial = trial_in(tmp_path, model, span={"max_answer_len": 1})
    rows = read(trial.data.train)
    text = "i feel sad " * 20
    rows.append({"id": "long", "criterion": "feel sad", "text": text, "evidence": [[0, len(text)]], "label": 7})
    tiny.write_jsonl(Path(trial.data.train or ""), [{"label": None} | row for row in rows])  # not read, not looked at
    found = trial.resolve()
    has = found.splits["train"].with_evidence
    assert found.splits["train"].label_counts == {}
    train, validation = ([one for one in found.remarks if one.startswith(split)] for split in ("train", "validation"))
    assert any(f"of {has} rows with evidence 1 have none that lies wholly in a window of 28" in one for one in train)
    assert any(f"of {has} rows with evidence {has - 1} have a span of more than" in one for one in train)
    assert len(validation) == 1
    _, channel = trial.run(stop_at=1)
    assert [m.text for m in channel.messages() if isinstance(m, Note)][: len(found.remarks)] == list(found.remarks)


def test_windows_without_anything_new_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="span.doc_stride is 64, and a window with train.max_length = 28 has room"):
        trial_in(tmp_path, model, span={"doc_stride": 64}).resolve()
