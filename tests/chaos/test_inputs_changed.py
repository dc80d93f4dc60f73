"""Rows, models and code that are changed, removed or replaced while a study uses them: no trial learns from others."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import own_tasks
import tiny
from dryfit.settings.trial import Outcome
from study_runs import DEADLINE_S, ends, fold, resume_to_end, start, tune_to_end, wait_for, write_study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    write_study(folder, trials=3)
    return tune_to_end(folder)


def changed_after_a_trial(undisturbed: Path, folder: Path, change: Callable[[Path], object], status: int = 0) -> str:
    """Run the study again, change something once a trial has ended; what is printed on stderr."""
    folder.mkdir()
    for name in ("model", "data"):
        shutil.copytree(undisturbed / name, folder / name)
    shutil.copy(undisturbed / "study.toml", folder / "study.toml")
    process = start("tune", folder, "--quiet")
    assert wait_for(lambda: (folder / "ledger.jsonl").exists() and fold(folder).counted >= 1, process)
    change(folder)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    return errors


def fewer_rows(folder: Path) -> None:
    rows = (folder / "data/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "data/train.jsonl").write_text("".join(rows[:-5]), encoding="utf-8")


def no_cache(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


@pytest.mark.parametrize("change", [fewer_rows, no_cache])
def test_a_study_goes_on_with_the_rows_that_it_began_with(
    change: Callable[[Path], None], undisturbed: Path, tmp_path: Path
) -> None:
    changed_after_a_trial(undisturbed, tmp_path / "study", change)
    assert ends(tmp_path / "study") == ends(undisturbed)


def other_rows_and_no_cache(folder: Path) -> None:
    fewer_rows(folder)
    no_cache(folder)


def other_weights(folder: Path) -> None:
    weights = folder / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    for at in range(len(data) // 2 // 4 * 4, len(data), 4):
        data[at + 2] ^= 0x3F
    weights.with_name("other").write_bytes(data)
    weights.with_name("other").replace(weights)


@pytest.mark.parametrize(
    ("change", "words"), [(other_rows_and_no_cache, "the rows have changed"), (other_weights, "its files have changed")]
)
def test_a_study_whose_trials_would_learn_from_something_else_is_paused_until_it_is_put_back(
    change: Callable[[Path], None], words: str, undisturbed: Path, tmp_path: Path
) -> None:
    study = tmp_path / "study"
    errors = changed_after_a_trial(undisturbed, study, change, status=3)
    assert words in errors and "resume" in errors
    assert [trial.outcome for trial in fold(study).trials] == [Outcome.COMPLETE, None]
    for name in ("model", "data"):
        shutil.copytree(undisturbed / name, study / name, dirs_exist_ok=True)
    resume_to_end(study)
    assert ends(study) == ends(undisturbed)


_OWN_TASK = """
[study]
task = "edited_example.py:ScoreTask"
metric = "mse"
direction = "minimize"
trials = 3

[data]
file = "rows.jsonl"
validation_fraction = 0.3

[model]
name = "model"

[train]
epochs = 2
batch_size = 8
max_length = 32

[space]
"optim.lr" = {low = 1e-4, high = 1e-3}

[search]
mirror = "none"

[execution]
threads = 1
"""

_EDITS = {
    "to another function": "def walk(trial):\n    return -1.0\n",
    "to nothing": None,
}


@pytest.mark.parametrize("edit", _EDITS)
def test_a_function_that_is_edited_pauses_its_study(edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.py"
    own.write_text("import time\n\n\ndef walk(trial):\n    time.sleep(0.5)\n    return trial.params['x']\n", "utf-8")
    (tmp_path / "study.toml").write_text(
        '[study]\ntask = "objective"\ntrials = 4\n[objective]\nfunction = "own.py:walk"\n[space]\n'
        'x = {low = 0.0, high = 1.0}\n[search]\nmirror = "none"\nsampler = "random"\n',
        "utf-8",
    )
    process = start("tune", tmp_path, "--quiet")
    assert wait_for(lambda: (tmp_path / "ledger.jsonl").exists() and fold(tmp_path).counted >= 1, process)
    good, text = own.read_text("utf-8"), _EDITS[edit]
    own.unlink() if text is None else own.write_text(text, "utf-8")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, errors
    assert f": changed: importing {own} for a trial: it was edited" in errors and "Traceback" not in errors
    state = fold(tmp_path)
    assert [trial.outcome for trial in state.open_trials] == [None], "it was not lost"
    own.write_text(good, "utf-8")
    resume_to_end(tmp_path)
    assert [trial.value for trial in fold(tmp_path).trials] == [trial.params["x"] for trial in fold(tmp_path).trials]


def test_a_task_of_ones_own_that_is_edited_pauses_its_study(tmp_path: Path) -> None:
    own_tasks.score_rows(tmp_path, 24)
    tiny.model(tmp_path / "model")
    own = own_tasks.example_file(tmp_path, "edited_example")
    (tmp_path / "study.toml").write_text(_OWN_TASK, "utf-8")
    process = start("tune", tmp_path, "--quiet")
    assert wait_for(lambda: (tmp_path / "ledger.jsonl").exists() and fold(tmp_path).counted >= 1, process)
    own.write_text("raise SystemExit(0)\n", "utf-8")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, errors
    assert f": changed: importing {own} for a trial: it was edited" in errors
