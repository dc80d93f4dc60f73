"""``dryfit.Predictor``: it says exactly what ``dryfit predict`` says of the same rows, and what it cannot read."""

import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

import dryfit
import spans
import tiny
import tiny_lms
import trials
from dryfit.settings.errors import ConfigError, DataError
from dryfit.tasks import saved_models
from dryfit.training import prediction as in_memory
from dryfit.training import prediction as predicting

ROWS = [{key: row[key] for key in ("id", "criterion", "text")} for row in tiny.rows(11, seed=5, start=900)]
SPANS: dict[str, dict[str, Any]] = {"train": {"epochs": 1, "max_length": 28}, "span": {"doc_stride": 6}}

# PEFT itself asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def of_classes(folder: Path, **tables: Any) -> Path:
    """A trial's best weights."""
    trials.small(folder, encoder=tiny.model(folder / "encoder"), train={"epochs": 1}, **tables).run()
    return folder / "best"


def without_criteria(folder: Path) -> Path:
    """A model that reads texts alone."""
    data = tiny.data(folder / "data")
    for path in (Path(data["train"]), Path(data["validation"])):
        rows = [{key: row[key] for key in row if key != "criterion"} for row in trials.read_lines(path)]
        tiny.write_jsonl(path, rows)
    trials.Trial(folder, encoder=tiny.model(folder / "encoder"), data=data, train={"epochs": 1}).run()
    return folder / "best"


def of_spans(task: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        metric = "token_f1" if task == "evidence" else "combined"
        data = spans.both_data(folder / "data", train=24, validation=8)
        study = {"task": task, "metric": metric}
        trials.Trial(folder, encoder=tiny.model(folder / "encoder"), data=data, study=study, **SPANS).run()
        return folder / "best"

    return make


def of_prompts(folder: Path) -> Path:
    lm = {"format": "both", "max_new_tokens": 3, "generate_rows": 4, "answers": "never, always walk"}
    train = {"epochs": 1, "max_length": 160, "batch_size": 8}
    tables: dict[str, Any] = {"train": train, "lm": lm, "lora": {"r": 4}}
    data = tiny.data(folder / "data", train=16, validation=8)
    model = tiny_lms.causal_lm(folder / "qwen2")
    trials.Trial(folder, encoder=model, data=data, study={"task": "causal-lm"}, **tables).run()
    return folder / "best"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "criteria": of_classes,
    "evidence": of_spans("evidence"),
    "share": of_spans("share"),
    "joint": of_spans("joint"),
    "causal-lm": of_prompts,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_classes(tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_criteria(tmp_path_factory.mktemp("texts"))


def said_by_the_command(model: Path, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The lines for a file of another kind, whose rows are counted from 0."""
    source = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    return trials.predicted(model, source, folder / "out.jsonl", batch_rows=4)[1]


@pytest.mark.slow
@pytest.mark.parametrize("task", MAKERS)
def test_it_says_what_the_command_says(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "CHUNK_ROWS", 6)
    model = MAKERS[task](tmp_path / "study")
    said = dryfit.Predictor(model, device="cpu", batch=4)(ROWS)
    assert said == said_by_the_command(model, ROWS, tmp_path)
    assert said == json.loads(json.dumps(said))  # and it is what JSON holds: no tuple, no number of numpy's
    assert [line["row"] for line in said] == list(range(11))


def test_each_class_and_probability_is_that_of_the_command(model: Path, tmp_path: Path) -> None:
    said = dryfit.Predictor(model, device="cpu", batch=4)(ROWS)
    assert said == said_by_the_command(model, ROWS, tmp_path)
    assert len({round(line["probabilities"][0], 6) for line in said}) > 3


def test_a_plain_text_is_a_row_where_nothing_else_is_read(texts: Path) -> None:
    predictor = dryfit.Predictor(texts, device="cpu")
    assert predictor.columns == ("text",)
    (plain,) = predictor(["i walk"])  # each alone: rows of one batch may round differently
    (row,) = predictor([{"text": "i walk", "label": "not read", "further": object()}])
    assert plain["probabilities"] == row["probabilities"]
    assert plain["id"] is None


def test_it_is_loaded_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = dryfit.Predictor(model, device="cpu")
    monkeypatch.setattr(saved_models, "trained_model", None)
    first, second = (predictor(ROWS) for _ in range(2))
    assert first == second


def test_whatever_holds_rows_is_taken(model: Path) -> None:
    predictor = dryfit.Predictor(model, device="cpu")
    expected = predictor(ROWS)
    assert predictor(iter(ROWS)) == predictor(tuple(ROWS)) == expected
    assert predictor(pandas.DataFrame(ROWS).to_dict("records")) == expected


def test_a_text_is_never_too_long_and_a_criterion_can_be(model: Path) -> None:
    predictor = dryfit.Predictor(model, device="cpu")
    long = {"criterion": "feel sad", "text": "walk " * 50_000}
    cut = {"criterion": "feel sad", "text": "walk " * 500}
    assert predictor([long])[0]["probabilities"] == pytest.approx(predictor([cut])[0]["probabilities"], abs=1e-6)
    with pytest.raises(DataError, match=r"the rows given, row 1.*40"):
        predictor([cut, {"criterion": "very " * 40, "text": "i"}])


BAD = {
    "no text": ({"criterion": "feel sad"}, "column 'text' is missing"),
    "no criterion": ({"text": "i"}, "column 'criterion' is missing"),
    "a plain text": ("i walk", "it is a text alone: 'criterion' is missing"),
    "an empty text": ({"criterion": "feel sad", "text": " \n"}, "text is empty"),
    "no string": ({"criterion": "feel sad", "text": None}, "text is None"),
    "a number": (7, "it is 7, of type int"),
    "a list": (["i"], "of type list"),
    "nothing": (None, "of type NoneType"),
    "bytes": (b"i walk", "of type bytes"),
    "half a character": ({"criterion": "feel sad", "text": "i \ud800"}, "half a surrogate pair"),
    "an id that is none": ({"id": [1], "criterion": "feel sad", "text": "i"}, "id is"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_before_any_is_predicted(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, words = BAD[name]
    predictor = dryfit.Predictor(model, device="cpu")
    monkeypatch.setattr(in_memory, "predicted_lines", None)
    with pytest.raises(DataError) as caught:
        predictor([ROWS[0], ROWS[1], row])
    assert "row 2" in caught.value.doing
    assert words in caught.value.found
    assert caught.value.allowed


def test_bad_rows_have_their_errors_where_that_is_asked_for(model: Path) -> None:
    predictor = dryfit.Predictor(model, device="cpu")
    several: list[Any] = [ROWS[0], "alone", {**ROWS[1], "text": ""}, ROWS[1]]
    said = predictor(several, allow_bad=True)
    good = predictor([ROWS[0], ROWS[1]])
    assert [said[0]["probabilities"], said[3]["probabilities"]] == [line["probabilities"] for line in good]
    assert "criterion" in said[1]["error"] and said[1]["id"] is None
    assert "empty" in said[2]["error"] and said[2]["id"] == ROWS[1]["id"]
    with pytest.raises(DataError, match="of 4 rows 2 are bad"):
        predictor(several)
    assert all("error" in line for line in predictor(["a", "b"], allow_bad=True))


@pytest.mark.parametrize("rows", ["one text", {"text": "one row"}, b"bytes", 5, None, [], iter(())])
def test_what_is_no_list_of_rows_is_refused(rows: Any, model: Path) -> None:
    with pytest.raises(DataError, match="predicting rows"):
        dryfit.Predictor(model, device="cpu")(rows)


def test_a_data_frame_is_not_taken_for_its_columns(texts: Path) -> None:
    with pytest.raises(DataError, match=r"to_dict"):
        dryfit.Predictor(texts, device="cpu")(pandas.DataFrame(ROWS))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "cuda:7"}, "device is 'cuda:7'"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": True}, "batch is True"),
        ({"batch": 2.0}, "batch is 2.0"),
        ({"batch": 1 << 20}, "batch is"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        dryfit.Predictor("nowhere", **options)


def test_calls_from_several_threads_take_turns(model: Path) -> None:
    predictor, found = dryfit.Predictor(model, device="cpu", batch=3), dict[int, Any]()
    expected = predictor(ROWS)

    def ask(number: int) -> None:
        found[number] = [predictor(ROWS) for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), [expected] * 3)


def test_it_cannot_be_sent_to_another_process(model: Path) -> None:
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(dryfit.Predictor(model, device="cpu"))


def test_it_says_what_it_is(model: Path) -> None:
    text = repr(dryfit.Predictor(model, device="cpu"))
    assert str(model.resolve()) in text and "criteria" in text and "criterion, text" in text and "cpu" in text
