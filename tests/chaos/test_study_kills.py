"""A study survives any kill: exactly the trials asked for, the same values, nothing left running."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from dryfit.ledger.events import AttemptEvent, AttemptStarted, TrialFinished
from dryfit.ledger.ledger import LedgerTail
from dryfit.ledger.replay import StudyState
from study_runs import (
    ends,
    events_of,
    fold,
    kill_now,
    marked_processes,
    run,
    run_here,
    start,
    summary_of,
    wait_for,
    write_study,
)

SEARCHES = {
    "tpe-median": 'sampler = "tpe"\nstartup_trials = 2\npruner = "median"\npruner_startup_trials = 2',
    "tpe-asha": 'sampler = "tpe"\nstartup_trials = 2\npruner = "asha"',
}
TRIALS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study nobody has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    write_study(folder, trials=TRIALS, search=SEARCHES["tpe-median"])
    done = run("tune", folder, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["schema"] == 1
    counts = summary["trials"]
    assert counts["complete"] + counts["pruned"] == TRIALS
    assert (counts["failed"], counts["running"], counts["total"]) == (0, 0, TRIALS)
    assert summary["trial_overhead_ms"]["median"] > 0
    return folder


def copy_of(study: Path, folder: Path) -> Path:
    """The same study before its first run."""
    for name in ("model", "data"):
        shutil.copytree(study / name, folder / name)
    shutil.copy(study / "study.toml", folder / "study.toml")
    return folder


def assert_same(folder: Path, undisturbed: Path) -> None:
    """Exactly the trials, values and reports of the undisturbed study, and no process left."""
    assert ends(folder) == ends(undisturbed)
    finished = [event.number for event in events_of(folder) if isinstance(event, TrialFinished)]
    assert sorted(finished) == sorted(set(finished))
    assert summary_of(folder)["trials"]["running"] == 0
    assert marked_processes(folder) == []


@pytest.mark.slow
def test_kill_9_of_children_and_of_the_fork_server(undisturbed: Path, tmp_path: Path) -> None:
    folder = copy_of(undisturbed, tmp_path / "study")
    process = start("tune", folder, "--quiet")
    killed: list[int] = []
    for turn in range(4):

        def next_child() -> int | None:
            pids = [event.pid for event in events_of(folder) if isinstance(event, AttemptStarted)]
            return pids[-1] if pids and pids[-1] not in killed else None

        if not wait_for(next_child, process):
            break
        child = next_child()
        assert child is not None
        killed.append(child)
        time.sleep(0.1 * turn)
        victim = child if turn % 2 == 0 else _parent(child)
        if victim is not None:
            _kill(victim)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert_same(folder, undisturbed)


MOMENTS = [
    ("trial", "report"),
    ("study", "first_step"),
    ("study", "trial_finished"),
    ("study", "attempt_placed"),
    ("trial", "checkpoint"),
]
"""What is killed, and at which event after the kill before."""


@pytest.mark.slow
def test_kills_of_both_processes_at_five_moments(undisturbed: Path, tmp_path: Path) -> None:
    """A trial's process after a validation, the study's as it trains again, between two trials, as one starts."""
    folder = copy_of(undisturbed, tmp_path / "study")
    process = start("tune", folder, "--quiet")
    tail, state = LedgerTail(folder / "ledger.jsonl"), StudyState()
    left = list(MOMENTS)
    while left and process.poll() is None:
        for event in tail.read():
            state.apply(event)
            if not left or event.type != left[0][1]:
                continue
            if left[0][0] == "study":
                kill_now(process)
                process = start("resume", folder, "--quiet")
            else:
                assert isinstance(event, AttemptEvent)
                attempt = state.trials[event.number].attempts[-1]
                if attempt.pid is None or attempt.ended:
                    continue
                _kill(attempt.pid)
            del left[0]
        time.sleep(0.005)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert left == [], "the study was done before"
    assert_same(folder, undisturbed)


def _parent(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(status.rsplit(")", 1)[1].split()[1])


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.slow
def test_changed_data_begins_a_generation_and_earlier_trials_can_still_be_used(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "study"
    shutil.copytree(undisturbed, folder, ignore=shutil.ignore_patterns("doorbell", "stop"))
    lines = (folder / "data/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "data/train.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    checked = run("tune", folder, "--dry-run")
    assert "WARN  data: rows: the rows have changed" in checked.stdout
    words = ["--trials", "2", "--set", "train.epochs=1", "--set", "study.metric=accuracy"]
    done = run("resume", folder, *words)
    assert done.returncode == 0, done.stderr
    assert f"generation 2 begins (forks): {TRIALS} trials of generation 1 kept, 0 of them used" in done.stderr
    assert "the data has changed" in done.stderr and "train.epochs was 3, is now 1" in done.stderr
    assert ends(folder)[:TRIALS] == ends(undisturbed)
    summary = summary_of(folder)
    assert (summary["trials"]["complete"], summary["trials"]["total"]) == (2, 2)
    assert (summary["generation"]["number"], summary["generation"]["earlier"]) == (2, TRIALS)
    assert "generation 2 (since " in run_here("status", folder).stdout
    assert run_here("show", folder, "0").returncode == 0
    assert run("report", folder).returncode == 0
    complete = [trial for trial in fold(folder).trials[:TRIALS] if trial.value is not None]
    again = run("train", folder, "--trial", str(complete[0].number), "--json")
    assert again.returncode == 0, again.stderr
    assert "which had other rows: today's are used" in again.stderr
    trained = json.loads(again.stdout)
    assert trained["metric"] == "f1_macro", "what it was judged by then"
    assert trained["steps"] == complete[0].steps, "as many epochs as it had, not those of today"
