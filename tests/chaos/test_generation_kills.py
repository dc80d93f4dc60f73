"""A control process killed before, in the middle of, or after the line that begins a generation: nothing changes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import dryfit
import dying_control
import objectives
from study_runs import DEADLINE_S, events_of, fold, marked_processes, resume_to_end, run, run_here

SUPPORT = str(Path(objectives.__file__).parent)
TRIALS = 6
STUDY = """
[study]
task = "objective"
trials = {trials}
name = "own"

[objective]
function = "objectives:quadratic"
paths = ["{support}"]

[space]
x = {x}
n = {{low = 1, high = 3}}
kind = {kinds}

[search]
startup_trials = 3
"""


def write(
    folder: Path, *, trials: int = TRIALS, x: str = "{low = -4.0, high = 4.0}", kinds: Any = ("plain", "shifted")
):
    text = STUDY.format(trials=trials, support=SUPPORT, x=x, kinds=json.dumps(list(kinds)))
    (folder / "study.toml").write_text(text, encoding="utf-8")


def narrowed(folder: Path) -> None:
    write(folder, trials=3, x="{low = -1.0, high = 2.0}", kinds=["plain"])


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "study"
    folder.mkdir()
    write(folder)
    dryfit.tune(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    shutil.copytree(begun, folder, ignore=shutil.ignore_patterns("doorbell", "stop"))
    narrowed(folder)
    done = run("tune", folder)
    assert done.returncode == 0, done.stderr
    assert f"generation 2 begins (forks): {TRIALS} trials of generation 1 kept" in done.stderr
    assert "kind: [" in done.stderr and "x: -4 to 4 became -1 to 2" in done.stderr
    return folder


def ends(folder: Path) -> list[Any]:
    state = fold(folder)
    told = [(generation.number, generation.reused, generation.reasons) for generation in state.generations]
    return [told, *((one.number, one.generation, one.params, one.outcome, one.value) for one in state.trials)]


@pytest.mark.slow
def test_both_generations_are_plain_optuna_and_every_command_reads_them(undisturbed: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(undisturbed / "optuna.journal")))
    old, new = (optuna.load_study(study_name=name, storage=storage) for name in ("own", "own-g2"))
    assert (len(old.trials), len(new.trials)) == (TRIALS, 3)
    assert all(set(trial.params) == {"x", "n", "kind"} for trial in (*old.trials, *new.trials))
    assert all(-1 <= trial.params["x"] <= 2 and trial.params["kind"] == "plain" for trial in new.trials)
    state = fold(undisturbed)
    fitting = [t.number for t in state.trials[:TRIALS] if -1 <= t.params["x"] <= 2 and t.params["kind"] == "plain"]  # type: ignore[operator]
    assert list(state.generation.reused) == new.user_attrs["told"] == fitting
    assert state.best is not None and state.best.number >= TRIALS and new.best_value == state.best.value
    exported = dryfit.export(undisturbed, "optuna", undisturbed / "all.journal")
    again = JournalStorage(JournalFileBackend(str(exported)))
    assert optuna.load_study(study_name="own-g2", storage=again).best_value == new.best_value
    assert optuna.load_study(study_name="own", storage=again).best_value == old.best_value
    page = dryfit.write_report(undisturbed).read_text(encoding="utf-8")
    assert "Generations of the study" in page and "own-g2" in page
    assert "trial 2: complete" in run_here("show", undisturbed, "2").stdout


@pytest.mark.parametrize(
    "when", [pytest.param("before", marks=pytest.mark.slow), "midway", pytest.param("after", marks=pytest.mark.slow)]
)
def test_a_kill_around_the_line_that_begins_it(begun: Path, undisturbed: Path, tmp_path: Path, when: str) -> None:
    folder = tmp_path / "study"
    shutil.copytree(begun, folder, ignore=shutil.ignore_patterns("doorbell", "stop"))
    narrowed(folder)
    done = subprocess.run(
        [sys.executable, dying_control.__file__, "generation_began", when, "tune", str(folder), "--quiet"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=os.environ,
    )
    assert done.returncode == -9, done.stderr
    kinds = [event.type for event in events_of(folder)]
    assert kinds.count("generation_began") == (when == "after")
    if when == "midway":
        assert not (folder / "ledger.jsonl").read_bytes().endswith(b"\n")
    resume_to_end(folder)
    assert ends(folder) == ends(undisturbed)
    assert [event.type for event in events_of(folder)].count("generation_began") == 1
    assert marked_processes(folder) == []
