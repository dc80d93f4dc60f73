"""What signals do to a study of real processes: it checkpoints, leaves with the right status, and loses nothing."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dryfit.ledger.events import AttemptEnded, SessionClosed
from dryfit.settings.wire import STOP_FILE
from study_runs import (
    command,
    ends,
    events_of,
    fold,
    marked_processes,
    resume_to_end,
    run,
    run_here,
    start,
    tune_to_end,
    wait_for,
    write_stepwise,
)

PARALLEL = "parallel = 2\n"
AS_ASKED = "stopped as asked; it goes on from its checkpoint"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tune_to_end(write_stepwise(tmp_path_factory.mktemp("undisturbed") / "study", runtime=PARALLEL))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose trials take a while, each step of them."""
    monkeypatch.setenv("STEP_PAUSE_S", "0.15")
    return write_stepwise(tmp_path / "study", runtime=PARALLEL)


def running(folder: Path, *, progressed: bool = True) -> list[int]:
    """Trials' processes that run, and have reached a checkpoint."""
    if not (folder / "ledger.jsonl").exists():
        return []
    newest = [trial.attempts[-1] for trial in fold(folder).open_trials if trial.attempts]
    alive = [one for one in newest if one.pid is not None and not one.ended]
    return [one.pid for one in alive if one.pid is not None and (one.checkpoint_step is not None or not progressed)]


def begin(folder: Path, *, progressed: bool = True) -> subprocess.Popen[str]:
    """Start the study, and wait until two trials run."""
    process = start("tune", folder, "--quiet")
    assert wait_for(lambda: len(running(folder, progressed=progressed)) == 2, process)
    return process


def left(process: subprocess.Popen[str], folder: Path, status: int) -> list[AttemptEnded]:
    """The ends of attempts, once the study has left as it should and nothing of it runs."""
    _, errors = process.communicate()
    assert process.returncode == status, errors
    assert "dryfit resume" in errors
    assert marked_processes(folder) == []
    return [event for event in events_of(folder) if isinstance(event, AttemptEnded) and event.failure is not None]


def goes_on_as_undisturbed(folder: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    resume_to_end(folder)
    assert ends(folder) == ends(undisturbed)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGUSR2, 3),
        pytest.param(signal.SIGHUP, 3, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_makes_trials_checkpoint(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    process = begin(study)
    process.send_signal(number)
    stopped = left(process, study, status)
    assert {event.failure.sentence for event in stopped if event.failure} == {AS_ASKED}
    goes_on_as_undisturbed(study, undisturbed, monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.nightly)])
def test_a_batch_system_may_signal_every_process(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """And twice: what repeats itself is no more urgent."""
    process = begin(study)
    for _ in range(2):
        for pid in [*marked_processes(study), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.05)
    stopped = left(process, study, 3)
    assert {str(event.failure.kind) for event in stopped if event.failure} <= {"interrupted", "preempted"}
    assert all("from its checkpoint" in event.failure.sentence for event in stopped if event.failure)
    goes_on_as_undisturbed(study, undisturbed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "status"), [(signal.SIGTERM, 3), pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly)]
)
def test_ctrl_c_after_a_request_ends_everything_at_once(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, status: int
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "600")  # no trial would notice a request to stop
    process = begin(study, progressed=False)
    process.send_signal(first)
    # Two signals of one kind at once are one: the first is heard when both trials are asked to stop.
    assert wait_for(lambda: len(list(study.glob(f"trials/*/attempt-*/{STOP_FILE}"))) == 2, process)
    process.send_signal(signal.SIGINT)
    stopped = left(process, study, status)
    assert {event.failure.sentence for event in stopped if event.failure} == {
        "stopped at once; it goes on from its last checkpoint"
    }
    goes_on_as_undisturbed(study, undisturbed, monkeypatch)


@pytest.mark.slow
def test_nohup_works_and_stacks_are_written_on_request(study: Path, undisturbed: Path) -> None:
    with subprocess.Popen(
        ["nohup", *command("tune", study, "--quiet")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert wait_for(lambda: len(running(study)) == 2, process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "session.py" in (study / "logs/stacks.txt").read_text(encoding="utf-8")
    assert ends(study) == ends(undisturbed)
    assert all(len(trial.attempts) == 1 for trial in fold(study).trials)


@pytest.mark.slow
def test_sigterm_to_one_trial_makes_it_checkpoint_and_start_again(study: Path, undisturbed: Path) -> None:
    process = begin(study)
    os.kill(running(study)[0], signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    (stopped,) = (event for event in events_of(study) if isinstance(event, AttemptEnded) and event.failure is not None)
    assert (stopped.failure.kind, stopped.failure.action) == ("preempted", "retry")
    assert ends(study) == ends(undisturbed)


@pytest.mark.slow
def test_a_signal_that_comes_again_while_the_study_leaves_changes_no_status(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: isinstance(events_of(study)[-1], SessionClosed), process)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert left(process, study, 3)
    monkeypatch.setenv("STEP_PAUSE_S", "0")
    resume_to_end(study)
    assert ends(study) == ends(undisturbed)


@pytest.mark.slow
def test_time_in_which_a_study_was_suspended_is_no_hang(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stepwise(study, runtime=PARALLEL + "hang_timeout_s = 3\n")
    process = begin(study)
    stopped: Callable[[], list[int]] = lambda: [process.pid, *marked_processes(study)]  # noqa: E731
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped():
            with suppress(ProcessLookupError):  # whoever has ended between the look and the signal
                os.kill(pid, number)
        time.sleep(5 if number is signal.SIGSTOP else 0)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert ends(study) == ends(undisturbed)
    assert all(len(trial.attempts) == 1 for trial in fold(study).trials)


def test_dryfit_stop_and_a_second_process_is_refused(
    study: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(study)
    process.send_signal(signal.SIGSTOP)  # it must not end while a busy machine starts the others
    second = run("tune", study)
    assert second.returncode == 2
    assert "[BUSY]" in second.stderr
    assert str(process.pid) in second.stderr
    assert run_here("stop", study).returncode == 0
    process.send_signal(signal.SIGCONT)
    stopped = left(process, study, 3)
    assert {str(event.failure.kind) for event in stopped if event.failure} == {"interrupted"}
    assert run_here("stop", study).returncode == 1
    goes_on_as_undisturbed(study, undisturbed, monkeypatch)
