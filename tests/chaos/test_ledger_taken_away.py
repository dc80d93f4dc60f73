"""A study whose record is deleted, replaced, renamed or changed while it runs: nothing is lost, and it says so."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dryfit.ledger.ledger import read_ledger
from study_runs import (
    DEADLINE_S,
    ends,
    fold,
    kill_now,
    marked_processes,
    resume_to_end,
    run,
    run_here,
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


def older_copy(folder: Path, process: subprocess.Popen[str]) -> bytes:
    """The ledger in the middle of the second trial, whose process runs on."""
    begun = len(fold(folder).open_trials[0].reports)
    older = (folder / "ledger.jsonl").read_bytes()
    assert wait_for(lambda: any(len(trial.reports) >= begun + 2 for trial in fold(folder).open_trials), process)
    return older


@pytest.mark.parametrize("way", ["the newer one is put back", "the trials are moved away"])
def test_an_older_ledger_that_was_put_back_is_refused_and_changes_nothing(
    way: str, study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    older = older_copy(study, process)
    process.communicate(timeout=DEADLINE_S)
    ledger = study / "ledger.jsonl"
    newer = ledger.read_bytes()
    ledger.write_bytes(older)
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    before = {path: path.lstat().st_mtime_ns for path in (study / "trials").rglob("*")}
    for command in ("tune", "resume"):
        done = run_here(command, study, "--quiet")
        assert done.returncode == 2 and "its ledger is older than its folder" in done.stderr, done.stderr
        assert f"does not know all attempts in {study / 'trials/0002'}" in done.stderr
    assert ledger.read_bytes() == older
    assert {path: path.lstat().st_mtime_ns for path in (study / "trials").rglob("*")} == before
    if way == "the newer one is put back":
        ledger.write_bytes(newer)
    else:
        (study / "trials/0002").rename(study / "elsewhere")
    resume_to_end(study)
    assert ends(study) == ends(undisturbed)


def test_reports_that_a_put_back_ledger_lacks_are_taken_from_the_attempt_that_made_them(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    older = older_copy(study, process)
    kill_now(process)
    (study / "ledger.jsonl").write_bytes(older)
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    resume_to_end(study)
    assert ends(study) == ends(undisturbed)


def test_reports_that_a_stopped_control_process_never_heard_are_not_lost(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child goes on without verdicts, and writes checkpoints ahead of the ledger."""
    monkeypatch.setenv("STEP_PAUSE_S", "0.2")
    study = write_stepwise(tmp_path / "study", runtime="verdict_timeout_s = 0.1")
    process = begin(study)
    (trial,) = fold(study).open_trials
    process.send_signal(signal.SIGSTOP)
    known = {point.step for point in fold(study).open_trials[0].reports}
    messages = study / f"trials/{trial.number:04d}/attempt-1/messages.jsonl"
    assert wait_for(lambda: messages.read_bytes().count(b'"checkpointed"') > max(known) + 1)
    kill_now(process)
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    resume_to_end(study)
    assert ends(study) == ends(undisturbed)


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
