"""The supervisor with real children: forked ones and fresh ones alike."""

import os
import re
import sys
from pathlib import Path

import pytest

from dryfit.processes.attempt import HEAD_BYTES, MOST_BYTES, TAIL_BYTES, read_messages, read_result
from dryfit.processes.child import ChildStatus
from dryfit.processes.child_spec import ChildExited, ChildLimits, ChildMessage
from dryfit.processes.failures import classify
from dryfit.settings.errors import FailureKind, InternalError
from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import STACKS_FILE, Note, Phase, Report, Started, Verdict
from runtime_jobs import PATIENCE_S, Harness, alive, until_dead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@pytest.fixture(scope="module", params=[Isolation.FORKSERVER, Isolation.FRESH])
def harness(request, tmp_path_factory):
    with Harness(tmp_path_factory.mktemp("harness"), isolation=request.param) as opened:
        yield opened


def test_a_child_starts_speaks_and_leaves_a_result(harness):
    folder = harness.start("noop", "noop")
    exit_event = harness.until_exit("noop")
    assert exit_event.result is not None and isinstance(exit_event.result.answer, TrainResult)
    assert exit_event.result.answer.value == 1.0
    assert exit_event.evidence.exit_code == ChildStatus.RESULT
    started, loads = read_messages(folder)[:2]
    assert isinstance(started, Started) and started.overhead_ms > 0
    assert isinstance(loads, Phase) and loads.name == "load"  # every job begins by it
    assert read_result(folder) == exit_event.result
    log = (folder / "log.txt").read_text()
    assert '"job": "noop"' in log and "dryfit 0." in log and "python 3." in log


def test_each_report_gets_its_verdict(harness):
    harness.start("reports", "report")
    for n in range(2):
        event = harness.until_said("reports", "report")
        assert isinstance(event.message, Report)
        assert event.message.point == MetricPoint(n=n, step=n, epoch=float(n), value=float(n), metrics={})
        harness.supervisor.answer("reports", Verdict(n=n, proceed=n == 0))
    result = harness.until_exit("reports").result
    assert result is not None and isinstance(result.answer, TrainResult)
    assert (result.answer.value, result.answer.stopped_by) == (1.0, StopReason.VERDICT)


def test_everything_said_comes_before_the_one_end(harness):
    for number in range(4):
        harness.start(f"order{number}", "noop")
    keys = {f"order{number}" for number in range(4)}
    harness.until(lambda _: keys <= {e.key for e in harness.events if isinstance(e, ChildExited)})
    for number in range(4):
        mine = [e for e in harness.events if e.key == f"order{number}"]
        assert [isinstance(e, ChildExited) for e in mine] == [False] * (len(mine) - 1) + [True]
        assert isinstance(mine[0], ChildMessage) and isinstance(mine[0].message, Started)


def test_a_stop_request_lets_the_child_finish_by_itself(harness):
    harness.start("stop", "run")
    harness.until_said("stop", "started")
    harness.supervisor.ask_stop("stop")
    event = harness.until_exit("stop")
    assert event.evidence.stop_asked and event.evidence.exit_code == ChildStatus.RESULT
    assert classify(event.evidence, event.result).kind is FailureKind.INTERRUPTED


def test_a_child_that_ignores_a_stop_request_is_killed_after_its_grace(harness):
    harness.start("deaf", "hang", ChildLimits(60.0, 60.0, None, stop_grace_s=0.1))
    harness.until_said("deaf", "started")
    harness.supervisor.ask_stop("deaf")
    event = harness.until_exit("deaf")
    assert (event.evidence.signal, event.evidence.killed_by_us) == (9, "now")
    assert classify(event.evidence, event.result).kind is FailureKind.INTERRUPTED


def test_a_sigterm_from_outside_is_told_as_such(harness):
    harness.start("term", "sigterm")
    event = harness.until_exit("term")
    assert classify(event.evidence, event.result).kind is FailureKind.PREEMPTED


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("hang", r"process \d+, .*, sleeping: <lambda> \(runtime_jobs.py:\d+\) < run_job "),
        ("deadlock", r"process \d+, .*, sleeping: _deadlock \(runtime_jobs.py:\d+\) < <lambda> "),
        ("worker", r"process \d+, .*, sleeping: _worker \(runtime_jobs.py:\d+\) < <lambda> "),
        ("stopped", r"process \d+, .*, stopped: gave no stack"),
    ],
)
def test_a_hanging_child_leaves_its_stacks_and_is_killed(harness, job, told):
    """In a system call, in a lock that nobody gives back, in wait for a worker, and stopped by a signal."""
    folder = harness.start(job, job, ChildLimits(60.0, 0.3, None, 60.0))
    event = harness.until_exit(job)
    assert (event.evidence.killed_by_us, event.evidence.signal) == ("hang", 9)
    assert event.evidence.beat_age_s > 0.3
    assert re.search(told, event.evidence.stacks), event.evidence.stacks
    if job == "worker":
        assert "_worker_waits" in event.evidence.stacks
        note = next(e.message for e in harness.events if e.key == job and isinstance(getattr(e, "message", None), Note))
        assert until_dead(int(note.text))
    if job != "stopped":
        assert "run_child" in (folder / STACKS_FILE).read_text()
    assert classify(event.evidence, event.result).kind is FailureKind.HANG


def test_a_child_that_was_only_slow_to_begin_is_left_alone(harness):
    """Its limit is learned, and nothing was learned yet."""
    limits = ChildLimits(60.0, 60.0, None, 60.0, hang_learned=True)
    harness.start("slow", "slow", limits)
    event = harness.until_exit("slow")
    assert event.result is not None and not event.evidence.killed_by_us


def test_a_child_that_lives_but_takes_too_long_is_killed(harness):
    harness.start("long", "run", ChildLimits(60.0, 60.0, 0.3, 60.0))
    event = harness.until_exit("long")
    assert classify(event.evidence, event.result).kind is FailureKind.TIMEOUT


def test_an_exception_crosses_with_its_causes(harness):
    harness.start("fault", "fault")
    event = harness.until_exit("fault")
    assert event.evidence.exit_code == ChildStatus.FAULT
    assert (event.result.error.code, event.result.error.found) == ("DATA", "found 3")
    assert event.evidence.fault.type_names[0] == "dryfit.settings.errors.DataError"
    assert "builtins.OSError[ENOSPC]" in event.evidence.fault.type_names
    assert "_cause_chain" in event.evidence.fault.traceback


def test_leaving_without_a_word_and_much_output_do_no_harm(harness):
    harness.start("exit", "exit")
    event = harness.until_exit("exit")
    assert event.result is None and event.evidence.exit_code == 0
    assert classify(event.evidence, None).kind is FailureKind.KILLED
    folder = harness.start("print", "print")
    event = harness.until_exit("print")
    log = (folder / "log.txt").read_bytes()
    assert HEAD_BYTES + TAIL_BYTES < len(log) < MOST_BYTES and log.startswith(b"dryfit train child")
    assert b"bytes of this log are left out here" in log
    assert event.evidence.exit_code == 5
    assert event.evidence.log_tail.endswith("the last line\n") and len(event.evidence.log_tail) <= 8192


def test_a_native_crash_is_seen_and_leaves_its_stack(harness):
    folder = harness.start("crash", "crash")
    event = harness.until_exit("crash")
    assert classify(event.evidence, event.result).kind is FailureKind.NATIVE_CRASH
    assert "_crash" in (folder / STACKS_FILE).read_text()


def test_a_child_holds_nothing_of_ours_and_leads_its_own_session(harness):
    lock = os.open(harness.folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        folder = harness.start("facts", "facts")
        harness.until_exit("facts")
    finally:
        os.close(lock)
    notes = [message.text for message in read_messages(folder) if isinstance(message, Note)]
    # stacks.txt, and the doorbell it rings: nothing else.
    names = {Path(name).name for name in notes[0].splitlines()}
    assert names <= {"stacks.txt", "doorbell", "urandom"}, names
    assert "sid=True visible='' gc=True" in notes[1]


def test_a_kill_takes_the_descendants_along(harness):
    harness.start("family", "descendants")
    note = harness.until_said("family", "note").message
    assert isinstance(note, Note)
    pids = [int(pid) for pid in note.text.split()]
    assert all(alive(pid) for pid in pids)
    harness.supervisor.kill("family", "now")
    harness.until_exit("family")
    assert until_dead(*pids)


def test_a_child_is_killed_before_it_carries_its_marker(tmp_path, monkeypatch):
    monkeypatch.setattr("dryfit.processes.supervisor.kill_session", lambda _pid, _marker: None)
    with Harness(tmp_path, isolation=Isolation.FRESH) as harness:
        harness.start("young", "run")
        harness.supervisor.kill("young", "now")
        assert harness.until_exit("young").evidence.signal == 9


def test_wake_ends_a_wait(harness):
    harness.supervisor.wait(0.0)
    harness.supervisor.wake()
    assert harness.supervisor.wait(PATIENCE_S) == []


def test_a_key_that_runs_cannot_be_started_again_and_a_gone_one_is_left_alone(harness):
    harness.start("twice", "run")
    with pytest.raises(InternalError, match="runs already"):
        harness.start("twice", "run")
    harness.supervisor.kill("twice", "now")
    harness.until_exit("twice")
    harness.supervisor.kill("twice", "now")
    harness.supervisor.ask_stop("twice")
    harness.supervisor.answer("twice", Verdict(n=0, proceed=True))
    assert harness.supervisor.wait(0.0) == []


def test_closing_kills_what_runs_and_removes_the_doorbell(tmp_path):
    with Harness(tmp_path) as harness:
        harness.start("run", "run")
        started = harness.until_said("run", "started").message
        assert isinstance(started, Started)
        server = harness.supervisor.server_pid
        assert server is not None and (tmp_path / "doorbell").exists()
    assert until_dead(server, started.pid)
    assert not (tmp_path / "doorbell").exists()
