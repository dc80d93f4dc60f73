"""Classes that have names, from a CSV to the folder of weights that says them."""

import csv
import json
from pathlib import Path

import pytest
from transformers import AutoConfig

import tiny
from dryfit.api import doctor, predict, train
from dryfit.api.studies import tune
from dryfit.study.doctor.finding import Status
from dryfit.study.loop.next_step import End
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


def asked(folder: Path, count: int = 60) -> Path:
    """Questions about passages, answered ``yes`` or ``no``."""
    file = folder / "asked.csv"
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(("question", "passage", "answer"))
        for row in tiny.rows(count):
            writer.writerow((row["criterion"], row["text"], "yes" if row["label"] else "no"))
    return file


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
    assert resolved is not None and baselines is not None
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


def test_doctor_counts_rows_by_name(study: Path) -> None:
    found = doctor(study / "study.toml", machine=False)
    rows = [one.found for one in found.findings if one.check in ("train", "validation", "test")]
    assert len(rows) == 3 and all("by label no: " in one and ", yes: " in one for one in rows)
    assert all(one.status is not Status.FAIL for one in found.findings)


def test_a_name_that_no_training_row_has_is_refused_with_its_row(study: Path, tmp_path: Path) -> None:
    tiny.write_jsonl(
        tmp_path / "train.jsonl", [{"passage": f"p {at}", "answer": ["no", "yes"][at % 2]} for at in range(9)]
    )
    tiny.write_jsonl(tmp_path / "other.jsonl", [{"passage": "a", "answer": "no"}, {"passage": "b", "answer": "Yes!"}])
    text = STUDY.replace('file = "asked.csv"', 'train = "train.jsonl"\nvalidation = "other.jsonl"')
    text = text.replace("validation_fraction = 0.3\ntest_fraction = 0.2\n", "").replace('"model"', f'"{study}/model"')
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    done = run_here("tune", tmp_path / "study.toml")
    assert done.returncode == 2
    assert "other.jsonl, line 2: answer is 'Yes!'" in done.stderr
    assert "one of data.labels: no, yes" in done.stderr and "did you mean yes?" in done.stderr
