"""A configuration trained once more: the trial itself where rows and seed are its own, whatever interrupts it."""

import io
import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import tiny
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.choices import Metric
from dryfit.settings.errors import DataError, LoadError
from dryfit.settings.training_messages import Analysis, FinalRequest, FinalResult, TrainResult
from dryfit.settings.wire import Note
from dryfit.tasks.analysis import analyse
from dryfit.tasks.rows import TRAIN, VALIDATION, RawRow, UnlabelledRow, stream_rows
from dryfit.tasks.saved_models import load, read_model_input
from dryfit.tasks.scored_rows import RowFacts, read_rows, write_facts
from dryfit.training import prediction as predicting
from dryfit.training import trial_jobs as final_module
from dryfit.training.batches import read_tokens, trial_task
from dryfit.training.model import trial_parts
from dryfit.training.prediction import ModelPredictor, predict_rows
from dryfit.training.run import FixedLength
from dryfit.training.trainer import run_training
from dryfit.training.trial_jobs import final, train
from trials import predicted


def with_test_rows(folder: Path, *, alone: bool = False) -> dict[str, str]:
    data = tiny.data(folder / "data")
    data["test"] = str(tiny.write_jsonl(folder / "data" / "test.jsonl", tiny.rows(30, start=500)))
    for path in data.values() if alone else ():
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        tiny.write_jsonl(Path(path), [{key: row[key] for key in ("id", "text", "label")} for row in rows])
    return data


class Again:
    """A trial that has run, and runs of its configuration beside it."""

    def __init__(self, folder: Path, *, architecture: str = "bert", alone: bool = False, **tables: Any) -> None:
        encoder = tiny.model(folder / "model", architecture)
        self.trial = trials.Trial(folder, encoder=encoder, data=with_test_rows(folder, alone=alone), **tables)
        self.folder = folder

    def request(self, name: str, *, last_step: int | None = None, checkpoint_every_s: float = 1e9) -> FinalRequest:
        own = self.folder / name
        training = trials.alone(self.trial.request(checkpoint_every_s=checkpoint_every_s), own)
        training = training.model_copy(update={"load_report": str(self.folder / f"{name}-load.json")})
        model = str(own / "model")
        return FinalRequest(training=training, last_step=last_step, model_dir=model, attempt_model_dir=model, study="s")

    def run(self, name: str, *, last_step: int | None = None, stop_at: int | None = None) -> FinalResult | TrainResult:
        request = self.request(name, last_step=last_step, checkpoint_every_s=1e-9)
        return final(request, trials.ScriptedChannel(self.folder / name, stop_at=stop_at))


def scores(result: FinalResult | TrainResult) -> FinalResult:
    assert isinstance(result, FinalResult)
    training = result.training.model_copy(update={"peak_rss_bytes": None})
    return result.model_copy(update={"training": training, "model_dir": None})


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Again:
    return Again(tmp_path_factory.mktemp("again"))


def test_the_same_seed_and_rows_are_the_trial_itself_bit_for_bit(again: Again) -> None:
    before, channel = again.trial.run()
    once_more = again.run("plain")
    assert isinstance(once_more, FinalResult)
    assert once_more.training.value == before.value
    assert once_more.validation == channel.points[before.best or 0].metrics
    stored = load_file(again.folder / "plain" / "model" / "model.safetensors")
    assert stored.keys() == again.trial.best_weights().keys()
    assert all(torch.equal(stored[name], value) for name, value in again.trial.best_weights().items())
    assert once_more.rows == {"train": 40, "validation": 20, "test": 30, "trained": 40}


def test_train_and_validation_together_end_with_the_step_that_was_asked_for(again: Again) -> None:
    done = again.run("both", last_step=4)
    assert isinstance(done, FinalResult)
    assert (done.step, done.training.steps) == (4, 4)
    assert (done.validation, done.training.value) == (None, None)
    assert done.rows["trained"] == 60
    assert done.test is not None


@pytest.mark.slow
def test_a_fixed_length_keeps_the_schedule_and_the_batches(tmp_path: Path) -> None:
    """On the same rows, all steps of a fixed length are all steps of the trial."""
    again = Again(tmp_path, sched={"name": "cosine", "warmup_ratio": 0.3})

    def weights(length: FixedLength | None) -> dict[str, torch.Tensor]:
        body, channel = again.request("x").training, trials.ScriptedChannel(tmp_path / "channel")
        tokens = read_tokens(body, trial_task(body.config), only=(TRAIN, VALIDATION))
        parts = trial_parts(body, channel, tokens, length=length)
        assert run_training(parts, None).step == (10 if length is None else length.last_step)
        return parts.model.state_dict()

    plain, fixed, short = weights(None), weights(FixedLength(10, 10)), weights(FixedLength(10, 9))
    assert all(torch.equal(plain[name], fixed[name]) for name in plain)
    assert not all(torch.equal(plain[name], short[name]) for name in plain)


def test_a_search_never_reads_test(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    body = again.request("y").training
    read: list[tuple[str, ...]] = []
    monkeypatch.setattr("dryfit.training.trial_jobs.read_tokens", lambda *_, only, fold: read.append(only) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(body, trials.ScriptedChannel(again.folder / "channel"))
    assert read == [("train", "validation")]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("architecture", "head", "alone"),
    [
        ("bert", {"pooling": "mean"}, False),
        ("roberta", {"pooling": "max", "layers": 2, "hidden": 16, "activation": "tanh"}, True),
        ("distilbert", {"pooling": "cls", "layers": 1, "hidden": 24, "activation": "relu"}, False),
        ("xlnet", {"pooling": "cls", "layers": 1, "hidden": 16}, False),
        ("bert", {"pooling": "attention", "layers": 1, "hidden": 16, "activation": "silu"}, True),
    ],
)
def test_plain_python_opens_the_folder_as_its_readme_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    head: dict[str, Any],
    alone: bool,
) -> None:
    again = Again(tmp_path, architecture=architecture, alone=alone, head=head, train={"epochs": 1})
    again.run("final")
    folder = tmp_path / "final" / "model"
    assert (folder / "example.py").read_text(encoding="utf-8") in (folder / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(folder)
    capsys.readouterr()
    runpy.run_path("example.py")
    printed = json.loads(capsys.readouterr().out)
    texts = ("A text.",) if alone else ("a criterion", "A text.")
    tokens = load_tokenizer(FolderSource(str(folder)))(*texts, return_tensors="pt")
    with torch.inference_mode():
        expected = load(folder)(**tokens).softmax(dim=-1)
    torch.testing.assert_close(torch.tensor(printed), expected, rtol=0, atol=1e-6)


def test_the_card_says_what_a_stranger_needs(again: Again) -> None:
    again.run("card")
    text = (again.folder / "card" / "model" / "README.md").read_text(encoding="utf-8")
    request = again.request("z")
    for said in (
        f"fingerprint `{request.training.config.data_fingerprint}`",
        "seed 3",
        '[optim]\nname = "adamw"\nlr = 0.002',
        "| accuracy |",
        "Test was read once",
        f"torch {torch.__version__.split('+')[0]}",
    ):
        assert said in text, said
    assert str(again.folder) not in text  # paths are nobody's business


def test_the_test_split_is_looked_at_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(tmp_path)
    read_tokens = final_module.read_tokens

    def damaged(*args: Any, **kwargs: Any) -> Any:
        tokens = read_tokens(*args, **kwargs)
        tokens.splits["test"].ids_T[0] = 10_000
        return tokens

    monkeypatch.setattr(final_module, "read_tokens", damaged)
    monkeypatch.setattr(final_module, "run_training", lambda *_: pytest.fail("trained before it was looked at"))
    with pytest.raises(DataError, match="token id 10000 in 1 row: ") as caught:
        again.run("split")
    assert caught.value.doing == "checking the tokens of the split test"


def test_what_the_model_does_well_and_badly_stands_in_its_folder(again: Again) -> None:
    request = again.request("analysed")
    facts = {row["id"]: RowFacts(row["group"], row["criterion"]) for row in tiny.rows(30, start=500)}
    write_facts(again.folder / "facts.gz", facts)
    request = request.model_copy(update={"facts_file": str(again.folder / "facts.gz")})
    done = final(request, trials.ScriptedChannel(again.folder / "analysed"))
    assert isinstance(done, FinalResult) and done.analysis is not None and done.test is not None
    analysis = done.analysis
    assert (analysis.split, analysis.rows, analysis.notes) == ("test", 30, ())
    assert analysis.overall.scores[Metric.F1_MACRO] == pytest.approx(done.test[Metric.F1_MACRO], rel=1e-5)
    assert {one.name for one in analysis.criteria} == set(tiny.CRITERIA)
    file = read_rows(Path(request.training.scored_dir) / "test.jsonl.gz")
    assert file.metrics == pytest.approx(done.test) and len(file.rows) == 30
    assert analyse(file.rows, facts, split="test", metric=request.training.config.metric) == analysis
    folder = again.folder / "analysed" / "model"
    assert Analysis.model_validate_json((folder / "analysis.json").read_bytes()) == analysis
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "## What it does well and badly\n\nOn the 30 rows of test." in card
    assert "| class | precision | recall | F1 | rows |\n|---|--:|--:|--:|--:|\n| 0 |" in card
    assert analysis.classes is not None and f"| {analysis.classes.worst[0].id} | " in card


def test_without_test_rows_validation_is_analysed_and_where_it_was_trained_on_nothing_is(tmp_path: Path) -> None:
    again = Again(tmp_path, train={"epochs": 1})
    again.trial.data = again.trial.data.model_copy(update={"test": None})
    done = again.run("plain")
    assert isinstance(done, FinalResult) and done.test is None and done.validation is not None
    assert done.analysis is not None and (done.analysis.split, done.analysis.rows) == ("validation", 20)
    assert done.analysis.overall.scores["accuracy"] == pytest.approx(done.validation["accuracy"], rel=1e-5)
    assert "no such file" in done.analysis.notes[0]
    both = again.run("both", last_step=2)
    assert isinstance(both, FinalResult) and both.analysis is None
    assert not (tmp_path / "both" / "model" / "analysis.json").exists()


# ---- Predictions: those of the model itself, whatever the batches; every row has its line, in order


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
