"""Predictions: those of the model itself, whatever the batches; every row has its line, in order."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

import tiny
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.errors import DataError, LoadError
from dryfit.settings.wire import Note
from dryfit.tasks.rows import RawRow, UnlabelledRow, stream_rows
from dryfit.tasks.saved_models import load, read_model_input
from dryfit.training import prediction as predicting
from dryfit.training.prediction import ModelPredictor, predict_rows
from trials import predicted

ROWS = [{key: row[key] for key in ("id", "criterion", "text")} for row in tiny.rows(23, seed=5, start=900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial's best weights: a folder that says what rows it reads."""
    folder = tmp_path_factory.mktemp("model")
    trials.small(folder, encoder=tiny.model(folder / "encoder"), train={"epochs": 1}).run()
    return folder / "best"


def predictor(model: Path, *, batch_rows: int = 4, dtype: torch.dtype | None = None) -> ModelPredictor:
    tokenizer = load_tokenizer(FolderSource(str(model)))
    return ModelPredictor(load(model, dtype=dtype), tokenizer, read_model_input(model), batch_rows)


def probabilities(found: ModelPredictor, rows: list[UnlabelledRow]) -> torch.Tensor:
    return torch.tensor([line["probabilities"] for line in found.predict(rows)], dtype=torch.float64)


def by_hand(model: Path, rows: list[dict[str, str]], dtype: torch.dtype | None = None) -> torch.Tensor:
    """One row at a time, as a user of ``dryfit.load`` would."""
    loaded, tokenizer = load(model, dtype=dtype), load_tokenizer(FolderSource(str(model)))
    found: list[torch.Tensor] = []
    for row in rows:
        tokens = tokenizer(row["criterion"], row["text"], truncation="only_second", max_length=32, return_tensors="pt")
        with torch.inference_mode():
            found.append(loaded(**tokens).double().softmax(dim=-1)[0])
    return torch.stack(found)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("batch_rows", [1, 5, 64])
def test_they_are_the_models_own_whatever_the_batch(
    model: Path, dtype: torch.dtype, within: float, batch_rows: int
) -> None:
    rows = [UnlabelledRow(row["id"], row["text"], row["criterion"], "") for row in ROWS]
    found = probabilities(predictor(model, batch_rows=batch_rows, dtype=dtype), rows)
    torch.testing.assert_close(found, by_hand(model, ROWS, dtype), rtol=0, atol=within)


def test_every_kind_of_file_gives_the_same_lines_in_order(model: Path, tmp_path: Path) -> None:
    jsonl = tiny.write_jsonl(tmp_path / "rows.jsonl", ROWS)
    csv = tmp_path / "rows.csv"
    csv.write_text("id,criterion,text\n" + "".join(",".join(row.values()) + "\n" for row in ROWS), encoding="utf-8")
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    expected = by_hand(model, ROWS)
    for source, first in ((jsonl, 1), (csv, 2), (parquet, 0)):
        result, lines = predicted(model, source, tmp_path / "out.jsonl")
        assert (result.rows, result.bad) == (23, 0)
        assert [line["id"] for line in lines] == [row["id"] for row in ROWS]
        assert [line["row"] for line in lines] == list(range(first, first + 23))
        found = torch.tensor([line["probabilities"] for line in lines], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert [line["label"] for line in lines] == found.argmax(dim=-1).tolist()


def test_a_bad_row_has_its_line_and_the_others_their_predictions(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "CHUNK_ROWS", 3)
    good = json.dumps(ROWS[0])
    lines = [
        good,
        "{",
        json.dumps({"id": "b", "text": "i"}),
        "",
        json.dumps({"id": 4, "text": " ", "criterion": "feel sad"}),
        json.dumps({"id": "c", "text": "i", "criterion": "very " * 40}),
        "[1]",
        json.dumps({"text": "i", "criterion": "feel sad", "label": "no number: not read"}),
        good,
    ]
    source = tmp_path / "rows.jsonl"
    source.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    result, found = predicted(model, source, tmp_path / "out.jsonl")
    assert (result.rows, result.bad) == (9, 6)
    assert [line["row"] for line in found] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    errors = {line["row"]: line["error"] for line in found if "error" in line}
    assert list(errors) == [2, 3, 5, 6, 7, 10]
    for row, said in {
        2: "not JSON",
        3: "'criterion' is missing",
        5: "empty",
        6: "has 40",
        7: "object",
        10: "UTF-8",
    }.items():
        assert said in errors[row]
        assert f"line {row}" in errors[row]
    assert [line["id"] for line in found] == [ROWS[0]["id"], None, "b", "4", "c", None, None, ROWS[0]["id"], None]
    assert found[0]["probabilities"] == pytest.approx(found[7]["probabilities"], abs=1e-6)
    notes = [m.text for m in trials.ScriptedChannel(tmp_path / "channel").messages() if isinstance(m, Note)]
    assert len(notes) == 6


def test_many_bad_rows_are_counted_not_told_one_by_one(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("x\n" * 30, encoding="utf-8")
    result, lines = predicted(model, source, tmp_path / "out.jsonl")
    assert (result.rows, result.bad, len(lines)) == (30, 30, 30)
    notes = [m.text for m in trials.ScriptedChannel(tmp_path / "channel").messages() if isinstance(m, Note)]
    assert len(notes) == 21
    assert "10 more bad rows" in notes[-1]


def test_a_file_that_cannot_be_read_to_its_end_leaves_what_was_there(model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    source.write_text('id,criterion,text\na,feel sad,i\nb,feel sad,"i', encoding="utf-8")
    out.write_text("before", encoding="utf-8")
    with pytest.raises(DataError, match="not CSV"):
        predicted(model, source, out)
    assert out.read_text(encoding="utf-8") == "before"


def test_memory_does_not_grow_with_the_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rows are taken from the source than the chunk at hand needs."""
    monkeypatch.setattr(predicting, "CHUNK_ROWS", 5)
    taken: list[int] = []
    written: list[int] = []

    def rows() -> Any:
        for number, row in enumerate(ROWS):
            taken.append(number)
            written.append(file.getvalue().count("\n"))
            yield RawRow(row, "x.jsonl", number)

    file = io.StringIO()
    predict_rows(predictor(model), rows(), file, trials.ScriptedChannel(tmp_path / "channel"))
    assert all(number - lines <= 5 for number, lines in zip(taken, written, strict=True))
    assert file.getvalue().count("\n") == 23


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_sources_are_read_as_they_are_asked_for(tmp_path: Path, suffix: str) -> None:
    """A reader that took the whole file first would see what is written only afterwards."""
    many = [{"text": f"text {number}"} for number in range(20_000)]
    path = tmp_path / f"rows.{suffix}"
    writers: dict[str, Callable[[], object]] = {
        "jsonl": lambda: tiny.write_jsonl(path, many),
        "csv": lambda: path.write_text("text\n" + "\n".join(row["text"] for row in many), encoding="utf-8"),
        "parquet": lambda: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(many), path, row_group_size=1000),
    }
    writers[suffix]()
    rows = stream_rows(str(path))
    first = next(rows)
    assert isinstance(first, RawRow)
    assert first.values == {"text": "text 0"}
    path.write_bytes(b"") if suffix != "parquet" else None
    left = sum(1 for _ in rows)
    assert left == 19_999 if suffix == "parquet" else left < 19_999


def test_each_class_of_a_multi_label_model_has_a_probability_of_its_own(model: Path) -> None:
    one = predictor(model)
    several = replace(one, model_input=one.model_input.model_copy(update={"multi_label": True}))
    rows = [UnlabelledRow(None, row["text"], row["criterion"], "") for row in ROWS[:3]]
    logits = torch.log(probabilities(one, rows))  # softmax leaves the differences of the scores
    odds = torch.logit(probabilities(several, rows))
    torch.testing.assert_close(odds[:, 0] - odds[:, 1], logits[:, 0] - logits[:, 1], rtol=0, atol=1e-6)
    tokens = several.task.tokenise_unlabelled(rows[:1], several.tokenizer)
    said = list(several.task.predictions(torch.logit(torch.tensor([[0.6, 0.5, 0.4]])), tokens, rows[:1]))
    assert [one["label"] for one in said] == [[0, 1]]


def test_a_folder_that_does_not_say_what_it_reads_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="No such file"):
        read_model_input(tmp_path)
    meta = json.loads((model / "dryfit.json").read_text(encoding="utf-8"))
    del meta["input"]
    (tmp_path / "dryfit.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(LoadError, match="does not say") as refused:
        read_model_input(tmp_path)
    assert "dryfit train" in refused.value.hint


def test_a_word_that_the_embedding_does_not_have_is_told_with_its_row(model: Path) -> None:
    """Without the check: an index error on the CPU, and on a device an assertion that says nothing."""
    found = predictor(model)
    found.tokenizer.add_tokens(["zebra"])
    rows = [UnlabelledRow(row["id"], row["text"], row["criterion"], "") for row in ROWS[:3]]
    rows[1] = replace(rows[1], text=rows[1].text + " zebra")
    with pytest.raises(DataError, match=r"token id \d+ in 1 row: ") as caught:
        probabilities(found, rows)
    assert "the model's embedding has" in caught.value.allowed
    assert "zebra" not in str(caught.value)
