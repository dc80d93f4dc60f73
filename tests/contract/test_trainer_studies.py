"""Trainers of the user's own, searched in real processes: killed at every event, and wrong in every way."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bert import BertForSequenceClassification

import dryfit
import trainers
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.state import TrialState
from dryfit.settings.errors import ExitStatus, ObjectiveError
from dryfit.settings.trial import Outcome
from study_runs import fold, run_here
from tiny_lms import causal_lm

pytestmark = [pytest.mark.heavy]

SUPPORT = str(Path(trainers.__file__).parent)
SEARCH = {"sampler": "random", "mirror": "none"}


def tune(
    folder: Path, make: Any = trainers.make, *, trials: int = 1, ends: ExitStatus = ExitStatus.DONE, **given: Any
) -> list[TrialState]:
    """Search a Trainer, and return the trials."""
    runtime = {"checkpoint_every_s": 1000.0, "max_failed_in_a_row": 100, "max_same_failure": 100}
    arguments = {"space": trainers.SPACE, "metric": "eval_loss", **given}
    arguments["runtime"] = runtime | arguments.get("runtime", {})
    result = dryfit.tune(trainer=make, folder=folder, trials=trials, **{"search": SEARCH, **arguments})
    assert result.status is ends, result
    return fold(folder).trials


def curve(trial: TrialState) -> list[tuple[int, float, dict[str, float]]]:
    return [(point.step, point.value, point.metrics) for point in trial.reports]


def loss_of(weights: Path) -> float:
    """The loss of saved weights on the rows that Trainers are evaluated on."""
    model, rows = BertForSequenceClassification.from_pretrained(weights), trainers.rows(32, 2)
    ids, labels = torch.stack([row["input_ids"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrialState]:
    """One trial of each maker that nobody has killed."""
    found: dict[str, TrialState] = {}
    for name, make in trainers.MAKERS.items():
        metric = "eval_far_loss" if name == "initialised" else "eval_loss"
        (found[name],) = tune(tmp_path_factory.mktemp(name) / "study", make, metric=metric, direction="minimize")
        assert found[name].outcome is Outcome.COMPLETE, found[name]
    return found


@pytest.mark.slow
def test_the_value_is_the_best_evaluation(undisturbed: dict[str, TrialState]) -> None:
    trial = undisturbed["make"]
    assert [step for step, _, _ in curve(trial)] == list(range(2, trainers.STEPS + 1, 2))
    assert trial.value == min(value for _, value, _ in curve(trial))
    assert {"eval_loss", "eval_accuracy"} == set(trial.reports[0].metrics)
    assert [step for step, _, _ in curve(undisturbed["by_epoch"])] == [6, 12]
    assert len(curve(undisturbed["stops_early"])) < 18


KILLS = [
    ("make", [("step", 1)]),
    ("make", [("end", 12)]),
    ("make", [("save", 8), ("half", 10), ("step", 11)]),
    ("make", [("stop at step", 3), ("stop at evaluate", 6), ("stop at step", 7)]),
    ("by_epoch", [("save", 6), ("evaluate", 12)]),
    ("stops_early", [("save", 4), ("step", 7)]),
    ("initialised", [("stop at step", 5), ("evaluate", 8)]),
    ("draws", [("save", 4), ("step", 7), ("stop at step", 9)]),
    ("weights_only", [("step", 5)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("maker", "at"), KILLS, ids=lambda value: str(value).replace(" ", "-"))
def test_a_trial_that_was_killed_has_the_values_of_one_that_was_not(
    maker: str, at: list[tuple[str, int]], undisturbed: dict[str, TrialState], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("KILL_AT", json.dumps({"maker": maker, "at": at}))
    metric = "eval_far_loss" if maker == "initialised" else "eval_loss"
    (trial,) = tune(tmp_path / "study", trainers.killed, metric=metric, direction="minimize")
    expected = undisturbed[maker]
    assert len(trial.attempts) == 1 + len(at)
    assert (trial.outcome, trial.value) == (Outcome.COMPLETE, expected.value)
    assert curve(trial) == curve(expected)
    if at[-1] == ("step", 11):  # killed before the checkpoint of step 8 was marked, and in that of step 10
        assert [attempt.checkpoint_step for attempt in trial.attempts] == [6, 8, 10, 12]


# ---- every way to end

ENDS = {
    "none": (Outcome.FAILED, "it is None (does every path of the function return a Trainer?)"),
    "class": (Outcome.FAILED, "it is the class Trainer"),
    "number": (Outcome.FAILED, "it is a float"),
    "own error": (Outcome.FAILED, "no such optimizer"),
    "no evaluation": (Outcome.FAILED, "it never evaluates: eval_strategy is 'no'"),
    "late evaluation": (Outcome.FAILED, "the Trainer has done 12 steps and no evaluation"),
    "two": (Outcome.FAILED, "the function itself calls train() of a Trainer"),
    "nan": (Outcome.PRUNED, "training step 5 of 12: the loss is nan in a batch of 8 rows"),
    "endless": (Outcome.FAILED, "max_steps"),
    "endless with steps": (Outcome.COMPLETE, ""),
    "no checkpoints": (Outcome.COMPLETE, ""),
    "weights only": (Outcome.COMPLETE, ""),
    "exit": (Outcome.FAILED, ""),
}


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, TrialState]]:
    """One trial of each way to end."""
    folder = tmp_path_factory.mktemp("ways") / "study"
    points = [{"way": way} for way in trainers.WAYS]
    trials = tune(
        folder,
        trainers.every_way,
        trials=len(points),
        space={"way": list(trainers.WAYS)},
        search={**SEARCH, "enqueue": points},
    )
    return folder, {str(trial.params["way"]): trial for trial in trials}


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDS)
def test_every_way_to_end_is_told(way: str, ways: tuple[Path, dict[str, TrialState]]) -> None:
    outcome, said = ENDS[way]
    trial = ways[1][way]
    assert trial.outcome is outcome, trial.reason
    assert said in trial.reason
    assert (trial.value is not None) == (outcome is Outcome.COMPLETE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("own error", "in arguments: return TrainingArguments("),
        ("no checkpoints", "save_strategy='no': checkpoints are written at evaluations"),
        ("weights only", "save_only_model=True: its checkpoints hold no optimizer state"),
    ],
)
def test_what_a_trial_says_stands_in_its_story(way: str, said: str, ways: tuple[Path, dict[str, TrialState]]) -> None:
    folder, trials = ways
    assert said in run_here("show", folder, str(trials[way].number)).stdout


@pytest.mark.slow
def test_what_nobody_reads_and_nobody_evaluates_is_told(tmp_path: Path) -> None:
    (trial,) = tune(tmp_path / "ignores", trainers.ignores)
    assert trial.outcome is Outcome.COMPLETE
    story = run_here("show", tmp_path / "ignores", "0").stdout
    assert "nothing has read rate, dropout from trial.params: the search over it has no effect" in story
    wrong: dict[str, Any] = {"metric": "eval_f1", "direction": "maximize"}
    (trial,) = tune(tmp_path / "metric", ends=ExitStatus.ANSWER_IS_NO, **wrong)
    assert trial.outcome is Outcome.FAILED
    assert "it is not there; there are eval_loss, eval_accuracy" in trial.reason
    assert not trial.reports and trial.attempts[0].first_step_ms is not None


# ---- the study around it


@pytest.mark.slow
def test_poor_trials_are_pruned_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    points = [{"rate": rate, "dropout": 0.1} for rate in (5e-3, 4e-3, 1e-6)]
    trials = tune(
        folder,
        trials=3,
        space={**trainers.SPACE, "rate": {"low": 1e-6, "high": 1e-2, "log": True}},
        metric="loss",
        direction="minimize",
        search={**SEARCH, "enqueue": points, "pruner": "median", "pruner_startup_trials": 2, "warmup_reports": 3},
        runtime={"keep": "best:1"},
    )
    assert [trial.outcome for trial in trials] == [Outcome.COMPLETE, Outcome.COMPLETE, Outcome.PRUNED]
    assert len(trials[2].reports) < len(trials[0].reports)
    state = fold(folder)
    assert state.best is not None
    kept = [number for number in range(3) if (StudyLayout(folder).trial(number).best).exists()]
    assert kept == [state.best.number]
    weights = StudyLayout(folder).trial(state.best.number).best
    assert loss_of(weights) == pytest.approx(state.best.value, rel=1e-5)
    assert "best weights" in run_here("show", folder).stdout
    assert not list(folder.glob("trials/*/checkpoints"))


@pytest.mark.slow
def test_a_study_file_names_the_function(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import trainers\n\ndef make_trainer(trial):\n    return trainers.make(trial)\n")
    (tmp_path / "own.toml").write_text(
        '[study]\ntask = "trainer"\ntrials = 1\n\n[trainer]\nmake = "train.py:make_trainer"\n'
        f'paths = [".", "{SUPPORT}"]\n\n'
        '[space]\nrate = [0.003]\ndropout = [0.1]\n\n[search]\nsampler = "random"\nmirror = "none"\n'
    )
    done = run_here("tune", tmp_path / "own.toml", "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metric"] == "eval_loss"
    text = (tmp_path / "own" / "frozen.toml").read_text(encoding="utf-8")
    assert 'make = "train.py:make_trainer"' in text and "[objective]" not in text
    assert run_here("resume", tmp_path / "own", "--quiet", "--trials", "2").returncode == 0
    values = [trial.value for trial in fold(tmp_path / "own").trials]
    assert len(values) == 2 and all(value is not None and math.isfinite(value) for value in values)


@pytest.mark.slow
def test_the_best_is_trained_once_more_with_its_values_and_to_its_end(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "study"
    monkeypatch.setenv("KILL_AT", json.dumps({"maker": "make", "at": []}))
    tune(folder, trainers.killed, runtime={"keep": "none"})
    (trial,) = fold(folder).trials
    monkeypatch.setenv("KILL_AT", json.dumps({"maker": "make", "at": [("step", 7)]}))  # of the new training
    done = run_here("train", folder, "-o", tmp_path / "model", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)
    assert (model["value"], model["searched"], model["validation"]["eval_loss"]) == (trial.value,) * 3
    assert model["steps"] == trainers.STEPS and model["rows"] == {} and model["test"] is None
    assert model["step"] == next(step for step, value, _ in curve(trial) if value == trial.value)
    assert model["validation"].keys() == {"eval_loss", "eval_accuracy"}
    run = StudyLayout(folder).final(f"trial-0000-seed-{trial.seed}")
    assert run.attempts == 2 and not run.checkpoints.exists() and not run.best.exists()
    assert (run.model / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert loss_of(run.model) == pytest.approx(trial.value, rel=1e-5)
    again = run_here("train", folder, "--trial", "0")
    assert again.returncode == 0 and run.attempts == 2, "done already"
    assert f"the best value at step {model['step']} of {trainers.STEPS}" in again.stdout
    top = run_here("train", folder, "--top", "1", "--seeds", "2", "--json", "--quiet")
    assert top.returncode == 0, top.stderr
    (row,) = json.loads(top.stdout)["configurations"]
    assert len({one["validation"] for one in row["runs"]}) == 2  # its weights are drawn by the trial's seed


@pytest.mark.slow
def test_what_cannot_be_done_with_a_trainer_of_ones_own_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    tune(folder, trainers.by_epoch, runtime={"keep": "best:1"})
    best = StudyLayout(folder).trial(0).best
    for words, said in (
        (("train", folder, "--with-validation"), "which rows it is validated on, only your own code knows"),
        (("train", folder, "--merge", "-o", tmp_path / "out"), "your own code saves the model"),
        (("train", folder, "--trial", "top2"), "not averaged any more"),
        (("train", folder, "--in-process"), f"what trial 0 has left is in {best}"),
        (("compare", folder, "--top", "2", "--seeds", "2"), "your function does"),
        (("export", best, "--to", "transformers-encoder", "-o", tmp_path / "out"), "its encoder is not known"),
        (("export", folder, "--to", "transformers", "-o", tmp_path / "out"), f"{best} is a model that other code than"),
        (("predict", best, "rows.jsonl", "-o", tmp_path / "out"), f"{best} is a model that other code than"),
    ):
        done = run_here(*words)
        assert done.returncode == ExitStatus.CANNOT_RUN and said in done.stderr, (words, done.stderr)
    for words in (("report", folder, "-o", tmp_path / "page.html"), ("export", folder, "--to", "csv")):
        assert run_here(*words).returncode == 0
    assert run_here("export", best, "--to", "transformers", "-o", tmp_path / "plain").returncode == 0
    assert loss_of(tmp_path / "plain") == loss_of(best)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "eval_loss" in page and "by_epoch" in page


@pytest.mark.parametrize("make", [trainers.needs_two, trainers.without_any])
def test_a_function_that_takes_no_trial_is_refused_before_the_first(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ObjectiveError, match="a function of one argument, the trial") as caught:
        tune(tmp_path / "study", make)
    assert "def make_trainer(trial): ..." in str(caught.value)


@pytest.mark.slow
def test_the_example_with_adapters_runs_as_it_is(tmp_path: Path) -> None:
    causal_lm(tmp_path / "model")
    text = (Path(__file__).parents[2] / "examples" / "sft_lora.py").read_text(encoding="utf-8")
    assert "trials=20" in text
    (tmp_path / "sft_lora.py").write_text(text.replace("trials=20", "trials=2"), encoding="utf-8")
    tiny = {"MODEL": str(tmp_path / "model"), "ROWS": "32"}
    words = [sys.executable, "sft_lora.py"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **tiny}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    state = fold(tmp_path / "sft-study")
    assert [trial.outcome for trial in state.trials] == [Outcome.COMPLETE] * 2, state.trials[0].reason
    assert [point.step for point in state.trials[0].reports] == [1, 2, 3, 4]
    best = StudyLayout(tmp_path / "sft-study").trial(0).best
    assert (best / "adapter_model.safetensors").is_file() and not (best / "optimizer.pt").exists()
