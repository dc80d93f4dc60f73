"""A trained model says what it does well and badly: in JSON, in its folder, on its card and on the report's page."""

import json
from pathlib import Path

import pytest

import tiny
from dryfit.core.jobs.analysis import Analysis
from dryfit.scoring.analysis import analyse
from dryfit.scoring.row_files import FACTS_FILE, read_facts, read_rows
from study_runs import run, run_here

STUDY = """
[study]
task = "joint"
trials = 1
metric = "combined"

[data]
train = "data/train.jsonl"
validation = "data/validation.jsonl"
test = "data/test.jsonl"

[model]
name = "model"

[train]
epochs = 1
batch_size = 8
max_length = 64

[head]
threshold = "calibrated"

[span]
doc_stride = 16

[search]
mirror = "none"

[execution]
threads = 1
device = "cpu"
"""


@pytest.mark.slow
def test_json_folder_card_and_report_agree(tmp_path: Path) -> None:
    for name, count, start in (("train", 40, 0), ("validation", 24, 40), ("test", 30, 64)):
        tiny.write_jsonl(tmp_path / "data" / f"{name}.jsonl", tiny.rows(count, start=start, groups=6))
    tiny.model(tmp_path / "model")
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    tuned = run("tune", tmp_path / "study.toml", "--quiet")
    assert tuned.returncode == 0, tuned.stderr
    trained = run("train", tmp_path, "--trial", "0", "--json")
    assert trained.returncode == 0, trained.stderr
    answer = json.loads(trained.stdout)
    model = Path(answer["folder"])
    analysis = Analysis.model_validate_json((model / "analysis.json").read_bytes())
    assert json.loads(analysis.model_dump_json()) == answer["analysis"]
    assert (analysis.split, analysis.rows, analysis.notes) == ("test", 30, ())
    assert {part.name for part in analysis.criteria} == set(tiny.CRITERIA) and len(analysis.groups) == 6
    for name, value in analysis.overall.scores.items():
        assert answer["test"][name] == pytest.approx(value, abs=1e-5), name
    assert analysis.classes is not None and analysis.spans is not None
    assert sum(map(sum, analysis.classes.confusion)) == 30
    threshold = json.loads((model / "dryfit.json").read_text(encoding="utf-8"))["input"]["fitted"]["class_threshold"]
    assert analysis.classes.curves[0].threshold == threshold
    file = read_rows(model.parent / "scored" / "test.jsonl.gz")
    facts = read_facts(tmp_path / "baselines" / FACTS_FILE)
    again = analyse(file.rows, facts, split="test", metric="combined", of=file.of, thresholds=(threshold,))
    assert again == analysis
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "## What it does well and badly" in card and "| rows | answered with a span | answered with none |" in card
    assert run_here("report", tmp_path).returncode == 0
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert f"Trained model {model.parent.name}" in page and "Rows with and without a span" in page
    assert "share that came true" in page and f"answered above {threshold:.4f}" in page
