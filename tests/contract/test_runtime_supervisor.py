"""The supervisor with real children: forked ones and fresh ones alike."""

import os
import re
import sys
from pathlib import Path

import pytest

from dryfit.config.schema import Isolation
from dryfit.core.errors import InternalError
from dryfit.core.failure import FailureKind
from dryfit.core.jobs import StopReason
from dryfit.core.settings.trial import MetricPoint
from dryfit.core.wire import STACKS_FILE, Note, Report, Started, Verdict
from dryfit.runtime.children.child import ChildStatus
from dryfit.runtime.children.child_spec import ChildExited, ChildLimits, ChildMessage
from dryfit.runtime.children.log_limit import HEAD_BYTES, MOST_BYTES, TAIL_BYTES
from dryfit.runtime.children.result_reading import read_messages, read_result
from dryfit.runtime.failures.classify import classify
from runtime_jobs import PATIENCE_S, House, alive, until_dead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@pytest.fixture(scope="module", params=[Isolation.FORKSERVER, Isolation.FRESH])
def house(request, tmp_path_factory):
    with House(tmp_path_factory.mktemp("house"), isolation=request.param) as opened:
        yield opened


def test_a_child_starts_speaks_and_leaves_a_result(house):
    folder = house.start("noop", "noop")
    exit_event = house.until_exit("noop")
    assert exit_event.result is not None and exit_event.result.train is not None
    assert exit_event.result.train.value == 1.0
    assert exit_event.evidence.exit_code == ChildStatus.RESULT
    started = read_messages(folder)[0]
    assert isinstance(started, Started) and started.overhead_ms > 0
    assert read_result(folder) == exit_event.result
    log = (folder / "log.txt").read_text()
    assert '"job": "noop"' in log and "dryfit 0." in log and "python 3." in log


def test_each_report_gets_its_verdict(house):
    house.start("reports", "report")
    for n in range(2):
        event = house.until_said("reports", "report")
        assert isinstance(event.message, Report)
        assert event.message.point == MetricPoint(n=n, step=n, epoch=float(n), value=float(n), metrics={})
        house.supervisor.answer("reports", Verdict(n=n, proceed=n == 0))
    result = house.until_exit("reports").result
    assert result is not None and result.train is not None
    assert (result.train.value, result.train.stopped_by) == (1.0, StopReason.VERDICT)


def test_everything_said_comes_before_the_one_end(house):
    for number in range(4):
        house.start(f"order{number}", "noop")
    keys = {f"order{number}" for number in range(4)}
    house.until(lambda _: keys <= {e.key for e in house.events if isinstance(e, ChildExited)})
    for number in range(4):
        mine = [e for e in house.events if e.key == f"order{number}"]
        assert [isinstance(e, ChildExited) for e in mine] == [False] * (len(mine) - 1) + [True]
        assert isinstance(mine[0], ChildMessage) and isinstance(mine[0].message, Started)


def test_a_stop_request_lets_the_child_finish_by_itself(house):
    house.start("stop", "run")
    house.until_said("stop", "started")
    house.supervisor.ask_stop("stop")
    event = house.until_exit("stop")
    assert event.evidence.stop_asked and event.evidence.exit_code == ChildStatus.RESULT
    assert classify(event.evidence, event.result).kind is FailureKind.INTERRUPTED


def test_a_child_that_ignores_a_stop_request_is_killed_after_its_grace(house):
    house.start("deaf", "hang", ChildLimits(60.0, 60.0, None, stop_grace_s=0.1))
    house.until_said("deaf", "started")
    house.supervisor.ask_stop("deaf")
    event = house.until_exit("deaf")
    assert (event.evidence.signal, event.evidence.killed_by_us) == (9, "now")
    assert classify(event.evidence, event.result).kind is FailureKind.INTERRUPTED


def test_a_sigterm_from_outside_is_told_as_such(house):
    house.start("term", "sigterm")
    event = house.until_exit("term")
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
def test_a_hanging_child_leaves_its_stacks_and_is_killed(house, job, told):
    """In a system call, in a lock that nobody gives back, in wait for a worker, and stopped by a signal."""
    folder = house.start(job, job, ChildLimits(60.0, 0.3, None, 60.0))
    event = house.until_exit(job)
    assert (event.evidence.killed_by_us, event.evidence.signal) == ("hang", 9)
    assert event.evidence.beat_age_s > 0.3
    assert re.search(told, event.evidence.stacks), event.evidence.stacks
    if job == "worker":
        assert "_worker_waits" in event.evidence.stacks
        note = next(e.message for e in house.events if e.key == job and isinstance(getattr(e, "message", None), Note))
        assert until_dead(int(note.text))
    if job != "stopped":
        assert "run_child" in (folder / STACKS_FILE).read_text()
    assert classify(event.evidence, event.result).kind is FailureKind.HANG


def test_a_child_that_was_only_slow_to_begin_is_left_alone(house):
    """Its limit is learned, and nothing was learned yet."""
    limits = ChildLimits(60.0, 60.0, None, 60.0, hang_learned=True)
    house.start("slow", "slow", limits)
    event = house.until_exit("slow")
    assert event.result is not None and not event.evidence.killed_by_us


def test_a_child_that_lives_but_takes_too_long_is_killed(house):
    house.start("long", "run", ChildLimits(60.0, 60.0, 0.3, 60.0))
    event = house.until_exit("long")
    assert classify(event.evidence, event.result).kind is FailureKind.TIMEOUT


def test_an_exception_crosses_with_its_causes(house):
    house.start("fault", "fault")
    event = house.until_exit("fault")
    assert event.evidence.exit_code == ChildStatus.FAULT
    assert event.result is not None and event.result.error is not None and event.evidence.fault is not None
    assert (event.result.error.code, event.result.error.found) == ("DATA", "found 3")
    assert event.evidence.fault.type_names[0] == "dryfit.core.errors.DataError"
    assert "builtins.OSError[ENOSPC]" in event.evidence.fault.type_names
    assert "_cause_chain" in event.evidence.fault.traceback


def test_leaving_without_a_word_and_much_output_do_no_harm(house):
    house.start("exit", "exit")
    event = house.until_exit("exit")
    assert event.result is None and event.evidence.exit_code == 0
    assert classify(event.evidence, None).kind is FailureKind.KILLED
    folder = house.start("print", "print")
    event = house.until_exit("print")
    log = (folder / "log.txt").read_bytes()
    assert HEAD_BYTES + TAIL_BYTES < len(log) < MOST_BYTES and log.startswith(b"dryfit train child")
    assert b"bytes of this log are left out here" in log
    assert event.evidence.exit_code == 5
    assert event.evidence.log_tail.endswith("the last line\n") and len(event.evidence.log_tail) <= 8192


def test_a_native_crash_is_seen_and_leaves_its_stack(house):
    folder = house.start("crash", "crash")
    event = house.until_exit("crash")
    assert classify(event.evidence, event.result).kind is FailureKind.NATIVE_CRASH
    assert "_crash" in (folder / STACKS_FILE).read_text()


def test_a_child_holds_nothing_of_ours_and_leads_its_own_session(house):
    lock = os.open(house.folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        folder = house.start("facts", "facts")
        house.until_exit("facts")
    finally:
        os.close(lock)
    notes = [message.text for message in read_messages(folder) if isinstance(message, Note)]
    # stacks.txt, and the doorbell it rings: nothing else.
    names = {Path(name).name for name in notes[0].splitlines()}
    assert names <= {"stacks.txt", "doorbell", "urandom"}, names
    assert "sid=True visible='' gc=True" in notes[1]


def test_a_kill_takes_the_descendants_along(house):
    house.start("family", "descendants")
    note = house.until_said("family", "note").message
    assert isinstance(note, Note)
    pids = [int(pid) for pid in note.text.split()]
    assert all(alive(pid) for pid in pids)
    house.supervisor.kill("family", "now")
    house.until_exit("family")
    assert until_dead(*pids)


def test_a_child_is_killed_before_it_carries_its_marker(tmp_path, monkeypatch):
    monkeypatch.setattr("dryfit.runtime.children.supervisor.kill_session", lambda _pid, _marker: None)
    with House(tmp_path, isolation=Isolation.FRESH) as house:
        house.start("young", "run")
        house.supervisor.kill("young", "now")
        assert house.until_exit("young").evidence.signal == 9


def test_wake_ends_a_wait(house):
    house.supervisor.wait(0.0)
    house.supervisor.wake()
    assert house.supervisor.wait(PATIENCE_S) == []


def test_a_key_that_runs_cannot_be_started_again_and_a_gone_one_is_left_alone(house):
    house.start("twice", "run")
    with pytest.raises(InternalError, match="runs already"):
        house.start("twice", "run")
    house.supervisor.kill("twice", "now")
    house.until_exit("twice")
    house.supervisor.kill("twice", "now")
    house.supervisor.ask_stop("twice")
    house.supervisor.answer("twice", Verdict(n=0, proceed=True))
    assert house.supervisor.wait(0.0) == []


def test_closing_kills_what_runs_and_removes_the_doorbell(tmp_path):
    with House(tmp_path) as house:
        house.start("run", "run")
        started = house.until_said("run", "started").message
        assert isinstance(started, Started)
        server = house.supervisor.server_pid
        assert server is not None and (tmp_path / "doorbell").exists()
    assert until_dead(server, started.pid)
    assert not (tmp_path / "doorbell").exists()
