"""``dryfit train`` and ``predict`` as a user meets them, on a study that nobody disturbs."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from dryfit.ledger.ledger import StudyLock
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.study.functions import train, train_top
from dryfit.study.next_step import End
from dryfit.study.studies import tune
from dryfit.tasks.saved_models import load
from study_runs import DEADLINE_S, command, fold, run, run_here, start, wait_for, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three trials of a model with its own code; the data has a test split."""
    folder = tmp_path_factory.mktemp("studies") / "study"
    file = write_study(folder, trials=3)
    tiny.own_code(folder / "model", 'if os.environ.pop("STOP_HERE", None): breakpoint()')
    tiny.write_jsonl(folder / "data" / "test.jsonl", tiny.rows(24, seed=3, start=400))
    text = file.read_text(encoding="utf-8")
    text = text.replace('validation.jsonl"\n', 'validation.jsonl"\ntest = "data/test.jsonl"\n')
    file.write_text(text.replace('name = "model"\n', 'name = "model"\ntrust_remote_code = true\n'), encoding="utf-8")
    assert tune(file).end is End.DONE
    return folder


def test_the_best_trial_once_more_is_the_trial_and_the_study_is_not_touched(study: Path, tmp_path: Path) -> None:
    best = fold(study).best
    assert best is not None
    ledger = (study / "ledger.jsonl").read_bytes()
    with StudyLock(study / "lock"):  # as if the study were running
        done = run_here("train", study, "--json", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["trial"], told["value"], told["searched"]) == (best.number, best.value, best.value)
    assert told["test"].keys() == told["validation"].keys()
    assert (study / "ledger.jsonl").read_bytes() == ledger
    out = tmp_path / "out"
    assert told["folder"] == str(out)
    trial = load_file(study / "trials" / f"{best.number:04d}" / "best" / "model.safetensors")
    stored = load_file(out / "model.safetensors")
    assert all(torch.equal(trial[name], stored[name]) for name in trial)
    assert type(load(out, trust=True).encoder).__name__ == "OwnModel"

    again = train(study)
    assert again.model is not None
    assert again.model.test == told["test"]
    (folder,) = (study / "final").glob(f"trial-{best.number:04d}-seed-{best.seed}")
    assert len(list(folder.glob("attempt-*"))) == 1  # it was not trained a second time
    assert not list(folder.glob("**/checkpoints")) and not list(folder.glob("**/best"))
    assert [path.relative_to(folder) for path in folder.glob("**/model")] == [Path("model")]
    with pytest.raises(ConfigError, match="something is there already"):
        train(study, out=out)


@pytest.mark.slow
def test_validation_is_trained_on_for_as_long_as_the_trial_took_to_its_best(study: Path) -> None:
    trial = fold(study).trials[0]
    assert trial.best is not None
    model = train(study, trial=0, with_validation=True).model
    assert model is not None
    assert model.step == model.steps == trial.reports[trial.best].step
    assert (model.value, model.validation, model.rows["trained"]) == (None, None, 96)
    assert model.test is not None


@pytest.mark.slow
def test_the_best_over_seeds_are_a_table_and_done_runs_are_not_repeated(study: Path) -> None:
    done = run("train", study, "--top", "2", "--seeds", "2", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    state = fold(study)
    ranked = sorted(state.trials, key=lambda trial: -(trial.value or 0))[:2]
    assert [one["trial"] for one in table["configurations"]] == [trial.number for trial in ranked]
    for one in table["configurations"]:
        values = [seed_run["validation"] for seed_run in one["runs"]]
        spread = one["validation"]
        assert [seed_run["seed"] for seed_run in one["runs"]] == [0, 1]
        assert spread["mean"] == pytest.approx(sum(values) / 2)
        assert spread["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert (spread["min"], spread["max"]) == (min(values), max(values))
        assert one["test"]["count"] == 2
    folders = sorted((study / "final").glob("*-scores"))
    assert len(folders) == 4
    assert not [folder for folder in folders if (folder / "model").exists()]
    assert train_top(study, top=2, seeds=2).table.model_dump(by_alias=True, mode="json") == table
    assert all(len(list(folder.glob("attempt-*"))) == 1 for folder in folders)


@pytest.mark.slow
def test_a_breakpoint_works_in_process(study: Path) -> None:
    trial = fold(study).trials[0]
    done = subprocess.run(
        command("train", study, "--trial", "0", "--in-process"),
        input="p type(self).__name__\np args or sorted(kwargs)\ncontinue\n",
        env=os.environ | {"STOP_HERE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "(Pdb)" in done.stdout
    assert "'OwnModel'" in done.stdout
    assert "'input_ids'" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(repr(trial.value))


@pytest.mark.slow
def test_predictions_of_a_trials_best_weights(study: Path, tmp_path: Path) -> None:
    best = fold(study).best
    assert best is not None
    model = study / "trials" / f"{best.number:04d}" / "best"
    rows, out = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(9)), tmp_path / "out.jsonl"
    done = run("predict", model, rows, "-o", out, "--json", "--trust")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 9
    before = out.read_text(encoding="utf-8")
    refused = run("predict", model, rows, "-o", out)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    rows.write_text(rows.read_text(encoding="utf-8") + "nonsense\n", encoding="utf-8")
    bad = run("predict", model, rows, "-o", out, "--force", "--trust")
    assert bad.returncode == 1
    assert "line 10: not JSON" in bad.stderr
    assert "10 rows, 1 of them bad" in bad.stdout
    assert out.read_text(encoding="utf-8").startswith(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trial", "9"], "there is no trial 9"),
        (["--trial", "worst"], "a number, best"),
        (["--top", "2"], "do not come alone"),
        (["--top", "2", "--seeds", "2", "--seed", "4"], "--seed beside it"),
        (["--in-process", "--with-validation"], "--with-validation beside it"),
        (["--trial", "top2"], "not averaged any more"),
        (["--trial", "top"], "a number, best"),
    ],
)
def test_what_would_be_ignored_or_is_not_there_is_refused(study: Path, words: list[str], said: str) -> None:
    done = run_here("train", study, *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_a_study_that_its_disk_has_no_room_for_is_refused_before_its_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100_000

    file = write_study(tmp_path / "study", trials=3)
    monkeypatch.setattr("dryfit.study.session.shutil.disk_usage", lambda _folder: Usage)
    with pytest.raises(MachineError, match="the study takes up to"):
        tune(file)
    assert not fold(tmp_path / "study").trials


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_it_in_between_changes_nothing(tmp_path: Path, number: int) -> None:
    study = tmp_path / "study"
    file = write_study(study, trials=1)
    assert run("tune", file, "--set", "train.epochs=8", "--quiet").returncode == 0
    value = fold(study).trials[0].value
    process = start("train", study, "--json")
    (paths,) = [study / "final" / f"trial-0000-seed-{fold(study).trials[0].seed}"]
    assert wait_for(lambda: len(list(paths.glob("attempt-1/checkpoints/step-*"))) > 1, process)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    done = run("train", study, "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["value"] == value
    assert len(list(paths.glob("attempt-*"))) == 2
