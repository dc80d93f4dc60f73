"""A study says first whether its best trial is worth anything: baselines, collapsed trials, rows with their answers."""

import json
import random
import re
from pathlib import Path

import pytest

import tiny
from dryfit.settings.trial import Outcome
from dryfit.tasks.row_metrics import row_metric
from dryfit.tasks.scored_rows import FACTS_FILE, read_facts, read_rows
from study_runs import fold, run, run_here, summary_of

STUDY = """
[study]
task = "{task}"
trials = {trials}
{study}

[data]
train = "data/train.jsonl"
validation = "data/validation.jsonl"
{data}

[model]
name = "model"

[train]
epochs = {epochs}
batch_size = 8
max_length = 64

[space]
"optim.lr" = {rates}

[search]
mirror = "none"
sampler = "random"

[execution]
threads = 1
device = "cpu"
"""


def skewed(count: int, start: int) -> list[dict[str, object]]:
    """Rows of which four in five have class 1, and whose words say nothing of it."""
    rng = random.Random(start)
    return [
        {
            "id": f"r{at}",
            "text": " ".join(rng.choices(tiny.WORDS, k=8)),
            "label": int(at % 5 > 0),
            "group": f"g{at // 2}",
        }
        for at in range(start, start + count)
    ]


def study(folder: Path, **values: object) -> Path:
    facts = {"task": "criteria", "trials": 2, "study": "", "data": "", "epochs": 1, "rates": "[1e-9, 2e-9]"} | values
    tiny.model(folder / "model")
    (folder / "study.toml").write_text(STUDY.format(**facts), encoding="utf-8")
    return folder


def rows_to(folder: Path, train: list[dict[str, object]], validation: list[dict[str, object]]) -> None:
    tiny.write_jsonl(folder / "data" / "train.jsonl", train)
    tiny.write_jsonl(folder / "data" / "validation.jsonl", validation)


@pytest.mark.slow
def test_a_best_trial_that_learned_nothing_is_said_to_have(tmp_path: Path) -> None:
    rows_to(tmp_path, skewed(80, 0), skewed(60, 80))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "baselines").symlink_to(elsewhere)
    done = run("tune", study(tmp_path, epochs=2, rates="[1e-3, 2e-3]"))
    assert done.returncode == 0, done.stderr
    assert not list(elsewhere.iterdir()) and not (tmp_path / "baselines").is_symlink()
    assert "strongest baseline: f1_macro 0." in done.stderr
    assert (
        "(best so far; collapsed, as every trial before it; not better than the strongest baseline, 0." in done.stderr
    )
    summary = summary_of(tmp_path)
    assert summary["collapsed"] == [0, 1] and summary["best"]["collapsed"] == "every row is answered with class 1"
    known = summary["baselines"]
    assert known["values"]["majority"] == pytest.approx(4 / 9)
    assert known["beaten"] is False and known["notes"] == []
    assert summary["best"]["value"] == pytest.approx(4 / 9)
    assert known["difference"] is None or known["difference"]["high"] <= 0.2
    for text in (done.stdout, run_here("status", tmp_path).stdout, run_here("show", tmp_path).stdout):
        assert "The best trial does not beat the strongest baseline" in text
        assert "2 of 2 complete trials collapsed" in text
        assert re.search(r"The best trial does not beat .*^ *best[ 0-9.]*: ", text, re.DOTALL | re.MULTILINE)
    assert run_here("report", tmp_path).returncode == 0
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "Every complete trial collapsed" in page and "always class 1" in page
    story = json.loads(run_here("show", tmp_path, "0", "--json").stdout)
    assert story["collapsed"] == "every row is answered with class 1" and len(story["scored"]) == 1


@pytest.mark.slow
def test_rows_with_answers_give_the_value_again_and_baselines_are_computed_once(tmp_path: Path) -> None:
    rows_to(tmp_path, tiny.rows(60, groups=12), tiny.rows(40, start=60, groups=8))
    done = run("tune", study(tmp_path, trials=1, rates="[1e-3]", study='metric = "mcc"'), "--quiet")
    assert done.returncode == 0, done.stderr
    state = fold(tmp_path)
    trial = state.trials[0]
    assert trial.outcome is Outcome.COMPLETE and state.baselines is not None
    file = read_rows(tmp_path / "trials/0000/scored/validation.jsonl.gz")
    assert file.of == 40 and file.metrics == pytest.approx(trial.reports[trial.best or 0].metrics, nan_ok=True)
    for name, value in file.metrics.items():
        metric = row_metric(name, file.rows)
        assert metric is not None and metric.value == pytest.approx(value, rel=1e-5, nan_ok=True), name
    facts = read_facts(tmp_path / "baselines" / FACTS_FILE)
    assert {facts[row.id].group for row in file.rows} == {f"g{number}" for number in range(60, 68)}
    assert {facts[row.id].criterion for row in file.rows} == set(tiny.CRITERIA)
    baseline = state.baselines.result.baselines[0]
    again = read_rows(tmp_path / "baselines" / baseline.name / "validation.jsonl.gz")
    metric = row_metric("mcc", again.rows)
    assert metric is not None and metric.value == pytest.approx(baseline.metrics["mcc"])
    more = run("tune", tmp_path, "--quiet", "--set", "study.trials=2")
    assert more.returncode == 0, more.stderr
    events = (tmp_path / "ledger.jsonl").read_text(encoding="utf-8").count('"type":"baselines"')
    assert events == 1
    other = run("tune", tmp_path, "--quiet", "--set", "study.metric=accuracy", "--set", "study.trials=1")
    assert other.returncode == 0, other.stderr
    assert (tmp_path / "ledger.jsonl").read_text(encoding="utf-8").count('"type":"baselines"') == 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["evidence", "joint"])
def test_spans_and_folds_have_baselines_of_their_own(tmp_path: Path, task: str) -> None:
    rows_to(tmp_path, tiny.rows(50, groups=25), tiny.rows(30, start=50, groups=15))
    folder = study(tmp_path, task=task, trials=1, rates="[1e-3]", data="folds = 2\n[span]\ndoc_stride = 16")
    done = run("tune", folder, "--quiet", "--set", f'study.metric="{"token_f1" if task == "evidence" else "combined"}"')
    assert done.returncode == 0, done.stderr
    state, summary = fold(tmp_path), summary_of(tmp_path)
    trial = state.trials[0]
    assert trial.outcome is Outcome.COMPLETE and len(trial.folds) == 2
    names = sorted(path.name for path in (tmp_path / "trials/0000/scored").iterdir())
    assert names == ["fold-1.jsonl.gz", "fold-2.jsonl.gz"]
    found = [read_rows(tmp_path / "trials/0000/scored" / name) for name in names]
    assert sum(file.of for file in found) == 80
    for file, score in zip(found, trial.folds, strict=True):
        metric = row_metric(state.goals[0].name, file.rows)
        assert metric is not None and metric.value == pytest.approx(score.value)
    difference = summary["baselines"]["difference"]
    value = summary["best"]["value"] - summary["baselines"]["values"][summary["baselines"]["strongest"]]
    assert difference["value"] == pytest.approx(value) and difference["low"] <= value <= difference["high"]
    assert any(
        name.startswith("never" if task == "evidence" else "majority+never") for name in summary["baselines"]["values"]
    )


@pytest.mark.slow
def test_none_are_computed_where_none_are_wanted(tmp_path: Path) -> None:
    rows_to(tmp_path, tiny.rows(30), tiny.rows(20, start=30))
    done = run("tune", study(tmp_path, trials=1, rates="[1e-3]", study="baselines_s = 0"), "--quiet")
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path)["baselines"] is None and not (tmp_path / "baselines").exists()
