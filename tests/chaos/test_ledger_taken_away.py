"""A study whose record is deleted, replaced, renamed or changed while it runs: nothing is lost, and it says so."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dryfit.store.ledger import read_ledger
from study_runs import (
    DEADLINE_S,
    ends,
    fold,
    marked_processes,
    resume_to_end,
    run,
    start,
    tune_to_end,
    wait_for,
    write_stepwise,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tune_to_end(write_stepwise(tmp_path_factory.mktemp("undisturbed") / "study"))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEP_PAUSE_S", "0.2")
    return write_stepwise(tmp_path / "study")


def begin(folder: Path) -> subprocess.Popen[str]:
    """Start the study, and wait until a trial has finished and the next one runs."""
    process = start("tune", folder, "--quiet")

    def well_begun() -> bool:
        if not (folder / "ledger.jsonl").exists():
            return False
        state = fold(folder)
        return state.counted >= 1 and any(trial.reports for trial in state.open_trials)

    assert wait_for(well_begun, process)
    return process


def deleted(folder: Path) -> None:
    (folder / "ledger.jsonl").unlink()


def replaced(folder: Path) -> None:
    copy = folder / "copy"
    shutil.copy(folder / "ledger.jsonl", copy)
    copy.replace(folder / "ledger.jsonl")


def renamed(folder: Path) -> None:
    (folder / "ledger.jsonl").rename(folder / "elsewhere.jsonl")


@pytest.mark.parametrize("taken", [deleted, replaced, renamed])
def test_a_record_that_is_taken_away_is_kept_beside_and_goes_on_from_there(
    taken: Callable[[Path], None], study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    before = read_ledger(study / "ledger.jsonl")
    taken(study)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, errors
    assert "[LEDGER]" in errors and "mv " in errors
    assert "Traceback" not in errors
    (kept,) = study.glob("ledger-kept-*.jsonl")
    assert read_ledger(kept)[: len(before)] == before, "a line is missing"
    kept.replace(study / "ledger.jsonl")
    assert marked_processes(study) == []
    assert fold(study).open_trials, "it ran on to its end"
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    resume_to_end(study)
    assert ends(study) == ends(undisturbed)


def test_a_record_that_another_program_changes_is_left_alone_and_the_last_lines_are_kept(study: Path) -> None:
    process = begin(study)
    before = (study / "ledger.jsonl").read_bytes()
    os.truncate(study / "ledger.jsonl", 10)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, errors
    assert (study / "ledger.jsonl").read_bytes() == before[:10], "what stands there is not ours to write"
    (kept,) = study.glob("ledger-recent-*.jsonl")
    assert kept.read_bytes().startswith(before), "this session has written all of it"


def test_a_study_whose_folder_is_renamed_ends_and_goes_on_in_its_new_place(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    moved = study.with_name("moved")
    study.rename(moved)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, errors
    assert f"moved to {moved}" in errors and "nothing is lost" in errors
    assert not study.exists(), "the old path came back"
    assert [trial.outcome for trial in fold(moved).trials if trial.outcome == "failed"] == []
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    resume_to_end(moved)
    assert ends(moved) == ends(undisturbed)


@pytest.mark.parametrize("what", ["lock", "lock and ledger"])
def test_a_deleted_lock_lets_no_second_writer_in(
    what: str, study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    (study / "lock").unlink()
    if what == "lock":
        second = run("tune", study, "--quiet")
        assert second.returncode == 2 and "[BUSY]" in second.stderr, second.stderr
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
        assert ends(study) == ends(undisturbed)
    else:
        replaced(study)
        monkeypatch.setenv("STEP_PAUSE_S", "0")
        second = run("tune", study, "--quiet")
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2 and "[LEDGER]" in errors, errors
        if second.returncode != 0:  # it came while the first one still had its lock
            assert "[BUSY]" in second.stderr, second.stderr
            resume_to_end(study)
        assert ends(study) == ends(undisturbed)


def test_a_deleted_lock_comes_back_while_the_study_runs(study: Path) -> None:
    process = begin(study)
    (study / "lock").unlink()
    assert wait_for((study / "lock").exists, process)
    assert wait_for(lambda: (study / "lock").read_text().strip() == str(process.pid), process)
    asked = run("stop", study)
    assert asked.returncode == 0, asked.stderr
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
