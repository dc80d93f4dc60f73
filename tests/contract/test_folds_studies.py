"""Whole studies whose trials have folds, in real processes: what a person sees of them, and what a kill leaves."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import own_tasks
import tiny
from dryfit.settings.splits import fold_groups
from dryfit.settings.trial import FoldScore, Outcome
from study_runs import fold, run, run_here, summary_of

pytestmark = pytest.mark.slow

TASK = """
from {module} import ScoreTask


class SizeTask(ScoreTask):
    \"\"\"Scores nothing but how many rows are held out, and is poor where a certain one is among them.\"\"\"

    knobs = {{"feared": "nobody"}}

    def loss_sum(self, outputs, batch):
        return outputs.square().sum()

    def metric_names(self):
        return ("size",)

    def metrics(self, kept, tokens, fitted):
        names = tokens.names_of(range(len(tokens)))
        return {{"size": len(names) / 8 + 10 * (self.context.own["feared"] in names)}}
"""

STUDY = """
[study]
task = "{task}:SizeTask"
metric = "size"
direction = "minimize"
trials = 3

[data]
train = "train.jsonl"
validation = "validation.jsonl"
folds = 3

[model]
name = "model"

[train]
epochs = 2
batch_size = 8
max_length = 32

[space]
"own.feared" = ["nobody", "{row}"]
"optim.lr" = {{low = 1e-4, high = 1e-3}}

[search]
sampler = "random"
pruner = "median"
pruner_startup_trials = 2
warmup_reports = 0
defaults_first = false
enqueue = [{{"own.feared" = "nobody"}}, {{"own.feared" = "nobody"}}, {{"own.feared" = "{row}"}}]

[execution]
threads = 1
device = "cpu"
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[str]]]:
    """Three trials of three folds; the third is poor in its second fold."""
    folder = tmp_path_factory.mktemp("folds")
    tiny.model(folder / "model")
    rows = [json.loads(line) for line in own_tasks.score_rows(folder, 22).read_text("utf-8").splitlines()]
    tiny.write_jsonl(folder / "train.jsonl", rows[:15])
    tiny.write_jsonl(folder / "validation.jsonl", rows[15:])
    of_row = fold_groups((row["id"] for row in rows), 3, seed=0, doing="", hint="")
    folds = {number: [name for name, found in of_row.items() if found == number] for number in (1, 2, 3)}
    own_tasks.example_file(folder, "folds_example")
    (folder / "folds_task.py").write_text(TASK.format(module="folds_example"), encoding="utf-8")
    text = STUDY.format(task="folds_task.py", row=folds[2][0])
    (folder / "study.toml").write_text(text, encoding="utf-8")
    done = run("tune", folder, "--json")
    assert done.returncode == 0, done.stderr
    return folder, folds


def scores(folds: dict[int, list[str]], numbers: tuple[int, ...] = (1, 2, 3)) -> tuple[FoldScore, ...]:
    """Eight rows are a step; both epochs are alike, so the first one is the best."""
    sizes = [len(folds[number]) for number in numbers]
    return tuple(FoldScore(size / 8, (), 2, 4, 4) for size in sizes)


def test_a_trial_is_worth_the_mean_of_its_folds(study: tuple[Path, dict[int, list[str]]]) -> None:
    folder, folds = study
    assert sorted(map(len, folds.values())) == [7, 7, 8]
    for trial in fold(folder).trials[:2]:
        assert (trial.outcome, trial.best, trial.steps) == (Outcome.COMPLETE, None, 12)
        assert trial.folds == scores(folds)
        values = [one.value for one in trial.folds]
        assert trial.value == sum(values) / 3 == pytest.approx(22 / 24)
        assert [point.n for point in trial.reports] == list(range(6))
        assert [point.fold for point in trial.reports] == [1, 1, 2, 2, 3, 3]
        assert [point.step for point in trial.reports] == [2, 4, 6, 8, 10, 12]
        assert trial.fold_reports == 2


def test_a_trial_is_pruned_in_its_second_fold(study: tuple[Path, dict[int, list[str]]]) -> None:
    folder, folds = study
    trial = fold(folder).trials[2]
    assert (trial.outcome, trial.value, trial.steps) == (Outcome.PRUNED, None, 6)
    assert trial.folds == scores(folds, (1,))
    assert trial.reason == "worse than the median of 2 trials at report 2"
    assert trial.reports[-1].value == (len(folds[1]) / 8 + len(folds[2]) / 8 + 10) / 2


def test_what_a_person_sees(study: tuple[Path, dict[int, list[str]]]) -> None:
    folder, folds = study
    values, spread = [one.value for one in scores(folds)], fold(folder).trials[0].spreads[0]
    best = summary_of(folder)["best"]
    assert (best["folds"], best["spread"]) == (values, spread)
    shown = run_here("show", folder)
    assert f"{sum(values) / 3:.4f} ± {spread:.4f}" in shown.stdout
    assert "best weights" not in shown.stdout
    story = run_here("show", folder, "2").stdout
    assert f"fold 1: {values[0]:.4f} at step 2 of 4" in story
    assert "of fold 2, so far" in story
    told: dict[str, Any] = json.loads(run_here("show", folder, "0", "--json").stdout)
    assert [one["value"] for one in told["folds"]] == values and told["spreads"] == {"size": spread}
    assert run_here("report", folder, "-o", folder / "page.html").returncode == 0
    assert f"± {spread:.4f}" in (folder / "page.html").read_text("utf-8")
    assert run_here("export", folder, "--to", "csv", "-o", folder / "trials.csv").returncode == 0
    with (folder / "trials.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [rows[0][f"fold.{n}"] for n in (1, 2, 3)] == list(map(repr, values))
    assert (rows[0]["spread"], rows[2]["spread"], rows[2]["fold.2"]) == (repr(spread), "", "")


def test_one_model_comes_of_them(study: tuple[Path, dict[int, list[str]]], tmp_path: Path) -> None:
    folder, _ = study
    assert not list(folder.glob("trials/*/best")) and not list(folder.glob("trials/*/checkpoints/*"))
    done = run("train", folder, "--trial", "0", "--with-validation", "--json", "-o", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "model" / "dryfit.json").read_text("utf-8"))
    assert facts["step"] == 2  # as the folds' best, of four
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    assert "Trained on 22 rows" in card
    assert f"in the mean over 3 folds of train and validation was {22 / 24:.6f}" in card
    assert "on average the best of the trial's folds" in card
