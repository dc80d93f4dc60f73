"""A study of every task at once: written, checked and tuned, the starter's own and those of the presets."""

import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

import tiny
from dryfit.settings.choices import PRESETS, BuiltInTask
from dryfit.study.template import TASKS
from study_runs import run, run_here

EACH_DAY = (("criteria", "max"), ("joint", "supermax"))
SMALL = {
    "study.trials": 1,
    "train.epochs": 1,
    "train.evals_per_epoch": 1,
    "data.train_limit": 24,
    "data.validation_limit": 12,
    "search.mirror": "none",
}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a starter study of each task; their encoder is a tiny one."""
    folder = tmp_path_factory.mktemp("all") / "first"
    done = run("init", folder, "--task", "all")
    assert done.returncode == 0, done.stderr
    assert f"dryfit tune {' '.join(str(folder / task) for task in TASKS)}" in done.stderr
    encoder = tiny.model(folder / "encoder", num_hidden_layers=8, max_position_embeddings=520)
    for task in TASKS:
        study = folder / task / "study.toml"
        assert str(study) in done.stdout
        study.write_text(study.read_text("utf-8").replace('name = "minilm"', f'name = "{encoder}"'), encoding="utf-8")
    return folder


def sets(values: Mapping[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.slow
def test_the_studies_of_all_tasks_are_tuned_in_a_row(first: Path) -> None:
    done = run("tune", *(first / task for task in TASKS), *sets(SMALL), "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    studies = json.loads(done.stdout)["studies"]
    assert [one["study"] for one in studies] == [str(task) for task in TASKS]
    assert [one["summary"]["trials"]["complete"] for one in studies] == [1] * len(TASKS)
    assert done.stderr.count(" of 5: ") <= 2 * len(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "preset"),
    [
        pytest.param(task, preset, marks=[] if (task, preset) in EACH_DAY else pytest.mark.nightly)
        for task, preset in product(TASKS, ("max", "supermax"))
    ],
)
def test_a_preset_of_every_task_passes_its_checks(preset: str, task: BuiltInTask, first: Path, tmp_path: Path) -> None:
    assert run_here("init", tmp_path / "new", "--preset", preset, "--task", task).returncode == 0
    model = first / task / "model" if task == "causal-lm" else first / "encoder"
    one_model = {"model.name": str(model), "space.model.name": f'["{model}"]'}
    done = run("tune", tmp_path / "new", "--dry-run", "--json", *sets(one_model))
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["healthy"], done.stdout
    assert not (tmp_path / "new/ledger.jsonl").exists()


def test_a_preset_of_another_task_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for words, said in (
        (("--preset", "evidence", "--task", "joint"), "allowed: joint, max, supermax"),
        (("--preset", "smoke", "--task", "all"), "smoke is for criteria"),
    ):
        done = run_here("init", tmp_path / "new", *words)
        assert done.returncode == 2 and said in done.stderr
        assert not (tmp_path / "new").exists()
    wrong = run_here("init", tmp_path / "new", "--task", "everything")
    assert wrong.returncode == 2 and "is not one of criteria" in wrong.stderr


def test_the_help_of_init_lists_every_preset_with_a_line() -> None:
    shown = run_here("init", "--help").stdout
    for name, line in PRESETS.items():
        assert re.search(rf"^ +{re.escape(name)} +{re.escape(line)}$", shown, re.MULTILINE), name
