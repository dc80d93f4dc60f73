"""Whole studies of share and joint, in real processes: killed and resumed, their front, a model that predicts."""

import json
from pathlib import Path

import pytest

import tiny
from dryfit.settings.trial import Outcome
from study_runs import ends, fold, kill_now, resume_to_end, run, start, summary_of, wait_for_events, write_study

pytestmark = pytest.mark.slow
SETS = ("span.doc_stride=4", "train.epochs=2", "execution.device=cpu")
OF_TASK = {
    "share": ("multitask.weighting=uncertainty", "multitask.criteria_share=0.5"),
    "joint": ("joint.share_ratio=0.5", "joint.fusion=attention"),
}


def study_in(folder: Path, task: str) -> list[str]:
    write_study(folder, trials=3, study=f'task = "{task}"\nmetric = "f1_macro"\nalso = ["token_f1"]')
    return [word for one in (*SETS, *OF_TASK[task]) for word in ("--set", one)]


@pytest.fixture(scope="module", params=[pytest.param("share", marks=pytest.mark.nightly), "joint"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "study"
    done = run("tune", folder, "--json", *study_in(folder, request.param))
    assert done.returncode == 0, done.stderr
    return request.param, folder


def beaten(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(theirs >= mine for mine, theirs in zip(one, other, strict=True)) and one != other


def test_two_goals_have_a_front(undisturbed: tuple[str, Path]) -> None:
    _, folder = undisturbed
    trials = fold(folder).trials
    assert [trial.outcome for trial in trials] == [Outcome.COMPLETE] * 3
    values = {trial.number: trial.values or () for trial in trials}
    for trial in trials:
        assert trial.best is not None
        point = trial.reports[trial.best]
        assert values[trial.number] == (point.metrics["f1_macro"], point.metrics["token_f1"])
    front = sorted(n for n, one in values.items() if not any(beaten(one, other) for other in values.values()))
    assert sorted(one["number"] for one in summary_of(folder)["pareto"]) == front
    shown = run("show", folder)
    assert shown.returncode == 0, shown.stderr
    assert "token_f1" in shown.stdout


def test_a_study_killed_twice_ends_as_if_it_had_not_been(undisturbed: tuple[str, Path], tmp_path: Path) -> None:
    task, whole = undisturbed
    folder = tmp_path / "study"
    sets = study_in(folder, task)
    for events in (8, 14):
        process = start("tune", folder, "--quiet", *sets)
        assert wait_for_events(folder, events, process)
        kill_now(process)
    resume_to_end(folder)
    assert ends(folder) == ends(whole)


def test_its_best_trial_becomes_a_model_that_predicts(undisturbed: tuple[str, Path], tmp_path: Path) -> None:
    task, folder = undisturbed
    done = run("train", folder, "--trial", "0", "--out", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "criteria" / "config.json").is_file() == (task == "joint")
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    assert f"for the task {task}" in card
    rows = tiny.rows(9, seed=5)
    asked = [{name: row[name] for name in ("id", "criterion", "text")} for row in rows]
    source, out = tiny.write_jsonl(tmp_path / "rows.jsonl", asked), tmp_path / "out.jsonl"
    done = run("predict", tmp_path / "model", source, "--out", out)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert line["label"] == max(range(2), key=line["probabilities"].__getitem__)
        assert sum(line["probabilities"]) == pytest.approx(1)
        assert line["text"] == (None if line["span"] is None else row["text"][slice(*line["span"])])
        assert line["candidates"]


def test_doctor_finds_it_in_order(undisturbed: tuple[str, Path], tmp_path: Path) -> None:
    task, _ = undisturbed
    done = run("doctor", tmp_path / "study", *study_in(tmp_path / "study", task))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with evidence" in done.stdout


@pytest.mark.nightly
def test_it_can_be_planned(undisturbed: tuple[str, Path], tmp_path: Path) -> None:
    task, _ = undisturbed
    done = run("plan", tmp_path / "study", "--device", "8GiB", "--json", *study_in(tmp_path / "study", task))
    assert done.returncode == 0, done.stderr
    assert '"fits"' in done.stdout
