"""Classes that have names, from a CSV to the folder of weights that says them."""

import csv
import io
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoConfig

import tiny
from dryfit.settings.study_file_reading import load_study_file
from dryfit.study.functions import doctor, init_rows, predict, train
from dryfit.study.machine_checks import Status
from dryfit.study.next_step import End
from dryfit.study.studies import tune
from study_runs import fold, run_here

STUDY = """
[study]
trials = 1
[data]
file = "asked.csv"
text = "passage"
criterion = "question"
label = "answer"
validation_fraction = 0.3
test_fraction = 0.2
[model]
name = "model"
[train]
epochs = 1
batch_size = 8
max_length = 40
[execution]
device = "cpu"
"""


class Typed(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


def asked(folder: Path, count: int = 60) -> Path:
    """Questions about passages, answered ``yes`` or ``no``."""
    file = folder / "asked.csv"
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(("question", "passage", "answer"))
        for row in tiny.rows(count):
            writer.writerow((row["criterion"], row["text"], "yes" if row["label"] else "no"))
    return file


def test_a_table_is_a_study_by_one_command(tmp_path: Path) -> None:
    """As a new user would: a table, two commands, and the model answers in its words."""
    asked(tmp_path)
    done = run_here("init", tmp_path / "mine", "--data", tmp_path / "asked.csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/mine/study.toml\n"
    assert "text: passage; criterion: question; label: answer" in done.stderr and "2 classes: no (" in done.stderr
    model = ["--set", f"model.name={tiny.model(tmp_path / 'model')}", "--set", "execution.device=cpu"]
    found = doctor(tmp_path / "mine", overrides=model[1::2], machine=False)
    assert all(one.status is not Status.FAIL for one in found.findings), found
    assert run_here("tune", tmp_path / "mine", "--trials", "1", "-q", *model).returncode == 0
    best = tmp_path / "mine" / "trials" / "0000" / "best"
    assert AutoConfig.from_pretrained(best).id2label == {0: "no", 1: "yes"}
    done = run_here("predict", best, tmp_path / "asked.csv", "-o", tmp_path / "said.jsonl")
    assert done.returncode == 0, done.stderr
    said = [json.loads(line)["label"] for line in (tmp_path / "said.jsonl").read_text("utf-8").splitlines()]
    assert len(said) == 60 and set(said) <= {"no", "yes"}


BAD_FILES = {
    "nothing": (b"", "it has no rows"),
    "header alone": (b"text,label\n", "it has no rows"),
    "one row": (b"text,label\na b c,1\n", "it has 1 row"),
    "binary": (bytes(range(256)), "is not UTF-8"),
    "names twice": (b"text,label,label\na b,1,2\n", "column 'label' is there twice"),
    "semicolons": (b"text;label\na b;1\n", "separated by semicolons"),
    "an open quote": (b'text,label\n"a b,1\n', "not CSV"),
    "a cell more": (b"text,label\na b,1\nc, d,0\n", "has not 2 columns"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_table_that_is_none_is_refused_in_words(tmp_path: Path, case: str) -> None:
    content, said = BAD_FILES[case]
    (tmp_path / "rows.csv").write_bytes(content)
    done = run_here("init", tmp_path / "study", "--data", tmp_path / "rows.csv")
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_all_kinds_of_files_give_the_same_study(tmp_path: Path, kind: str) -> None:
    """A byte order mark, quotes and line ends in cells change nothing."""
    rows = [{"text": f'he said "{at}",\nand no more', "label": ["a", "ä"][at % 2]} for at in range(20)]
    file = tmp_path / f"rows.{kind}"
    if kind == "csv":
        with file.open("w", encoding="utf-8-sig", newline="") as target:
            writer = csv.DictWriter(target, ("text", "label"))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        tiny.write_jsonl(file, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    written = init_rows(tmp_path / "study", file)
    data = load_study_file(written).config.data
    assert (data.labels, data.file, data.text) == (("a", "ä"), str(file), "text")


def test_what_is_not_clear_is_asked_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"some text {at}", "first": "ab"[at % 2], "second": "xy"[at % 2]} for at in range(20)]
    file = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    done = run_here("init", tmp_path / "study", "--data", file)
    assert done.returncode == 2
    assert "'first', 'second'" in done.stderr and "--label first" in done.stderr
    monkeypatch.setattr(sys, "stdin", Typed("nothing\n2\n"))
    monkeypatch.setattr("dryfit.documents.study_commands.is_asked", lambda: True)
    done = run_here("init", tmp_path / "study", "--data", file)
    assert done.returncode == 0, done.stderr
    assert load_study_file(tmp_path / "study").config.data.labels == ("x", "y")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--label", "answer"], "--label is given without --data"),
        (["--data", "x.csv", "--task", "all"], "--task all is of synthetic ones"),
        (["--data", "x.csv"], "there is no such file"),
        (["--data", "x.xlsx"], "there is no such file"),
        (["--data", "x.csv", "--task", "causal-lm"], "needs more than rows"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    done = run_here("init", tmp_path / "study", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    tiny.model(folder / "model")
    asked(folder)
    (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    assert tune(folder / "study.toml").end is End.DONE
    return folder


def test_a_study_learns_its_names_once_and_keeps_them(study: Path) -> None:
    state = fold(study)
    resolved, baselines = state.resolved, state.baselines
    assert resolved.labels == ("no", "yes")
    (majority,) = (one for one in baselines.result.baselines if one.name == "majority")
    assert majority.words.startswith(("always class yes,", "always class no,"))


def test_the_best_weights_and_a_trained_model_say_names(study: Path, tmp_path: Path) -> None:
    """A trial's weights are not the only ones: training reads the frozen study, which has no names."""
    done = train(study, out=tmp_path / "out")
    assert done.model is not None
    for folder in (study / "trials" / "0000" / "best", tmp_path / "out"):
        config = AutoConfig.from_pretrained(folder)
        assert config.id2label == {0: "no", 1: "yes"}
        assert config.label2id == {"no": 0, "yes": 1}
        rows = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"question": "feel sad", "passage": "you feel sad"}] * 3)
        predict(folder, rows, tmp_path / f"{folder.name}.jsonl")
        for line in (tmp_path / f"{folder.name}.jsonl").read_text("utf-8").splitlines():
            said = json.loads(line)
            assert set(said["probabilities"]) == {"no", "yes"}
            assert said["label"] == max(said["probabilities"], key=said["probabilities"].get)
    assert json.loads((tmp_path / "out" / "dryfit.json").read_text("utf-8"))["labels"] == ["no", "yes"]
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "\n| yes | " in card and "\n| no | " in card


def test_a_report_says_names(study: Path, tmp_path: Path) -> None:
    train(study, out=tmp_path / "out")
    done = run_here("report", study)
    assert done.returncode == 0, done.stderr
    page = (study / "report" / "index.html").read_text("utf-8")
    assert "no: " in page and "<td>yes</td>" in page
