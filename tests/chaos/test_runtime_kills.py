"""Real kills: of a child, of the fork server, of the control process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dryfit.processes.child_spec import ChildExited, ChildLimits
from dryfit.processes.failures import classify
from dryfit.processes.helpers import sweep
from dryfit.settings.errors import FailureKind
from dryfit.settings.study_file import Isolation
from dryfit.settings.wire import MARKER_VARIABLE, Note, Started
from runtime_jobs import Harness, alive, until_dead
from thinning import examples

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

_CONTROL = """
import sys, time
from pathlib import Path
from runtime_jobs import Harness
with Harness(Path(sys.argv[1])) as harness:
    harness.start("family", "descendants")
    harness.until_said("family", "started")
    note = harness.until_said("family", "note")
    child = next(e.message.pid for e in harness.events if e.message.type == "started")
    print(harness.supervisor.server_pid, child, note.message.text, flush=True)
    time.sleep(600)
"""


def start(harness: Harness, key: str, job: str = "run") -> int:
    harness.start(key, job)
    message = harness.until_said(key, "started").message
    assert isinstance(message, Started)
    return message.pid


@pytest.mark.parametrize("isolation", [Isolation.AUTO, Isolation.FRESH])
def test_a_killed_child_is_told_and_the_next_one_runs(tmp_path, isolation):
    with Harness(tmp_path, isolation=isolation) as harness:
        os.kill(start(harness, "victim"), signal.SIGKILL)
        event = harness.until_exit("victim")
        assert event.evidence.signal == signal.SIGKILL and not event.evidence.server_lost
        assert classify(event.evidence, event.result).kind is FailureKind.KILLED
        harness.start("next", "noop")
        assert harness.until_exit("next").result is not None


def test_a_killed_server_takes_its_children_along_and_is_replaced(tmp_path):
    with Harness(tmp_path) as harness:
        children = [start(harness, "one"), start(harness, "two")]
        first = harness.supervisor.server_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        harness.start("three", "noop")  # asked of a server that is already dead
        keys = {"one", "two", "three"}
        harness.until(lambda _: keys <= {e.key for e in harness.events if isinstance(e, ChildExited)})
        ends = {e.key: e for e in harness.events if isinstance(e, ChildExited)}
        for key in ("one", "two"):
            assert ends[key].evidence.server_lost
            assert classify(ends[key].evidence, ends[key].result).kind is FailureKind.LOST
        assert ends["three"].result is not None
        assert until_dead(*children)
        assert harness.supervisor.server_pid not in (None, first)


def test_a_terminated_server_lives_on_so_that_its_children_can_checkpoint(tmp_path):
    with Harness(tmp_path) as harness:
        child = start(harness, "child")
        server = harness.supervisor.server_pid
        assert server is not None
        os.kill(server, signal.SIGTERM)  # as a batch system does to all processes of a job
        os.kill(child, signal.SIGTERM)
        event = harness.until_exit("child")
        assert classify(event.evidence, event.result).kind is FailureKind.PREEMPTED
        assert harness.supervisor.server_pid == server and alive(server)


@pytest.mark.parametrize("isolation", [Isolation.AUTO, Isolation.FRESH])
def test_a_process_that_cannot_be_killed_is_not_waited_for(tmp_path, monkeypatch, isolation):
    """As one that a driver holds; here, one that the kill is kept from."""
    monkeypatch.setattr("dryfit.processes.supervisor._UNKILLABLE_S", 0.2)
    with Harness(tmp_path, isolation=isolation) as harness:
        child = start(harness, "held")
        with monkeypatch.context() as patch:
            patch.setattr("dryfit.processes.supervisor.kill_session", lambda *_: None)
            patch.setattr("dryfit.processes.attempt.FreshChild.kill", lambda _: None)
            harness.supervisor.kill("held", "hang")
            event = harness.until_exit("held")
        assert alive(child)
        assert classify(event.evidence, event.result).kind is FailureKind.HANG
        assert f"process {child} was killed 0.2 s ago and has not ended" in event.evidence.log_tail
        harness.start("next", "noop")
        assert harness.until_exit("next").result is not None
        os.kill(child, signal.SIGKILL)  # the driver let it go: its late end confuses nobody
        harness.start("last", "noop")
        assert harness.until_exit("last").result is not None
        assert until_dead(child)


def test_a_server_that_keeps_dying_is_given_up_for_fresh_interpreters(tmp_path):
    with Harness(tmp_path, preload=("no_such_module",)) as harness:
        for number in range(3):
            harness.start(f"child{number}", "noop")
            assert harness.until_exit(f"child{number}").result is not None
        assert harness.supervisor.server_pid is None
        assert ["note" in harness.said(f"child{number}") for number in range(3)] == [True, True, False]
        assert "no_such_module" in (tmp_path / "server.log").read_text()


def test_a_demanded_server_that_cannot_start_is_a_failed_start(tmp_path):
    with Harness(tmp_path, preload=("no_such_module",), isolation=Isolation.FORKSERVER) as harness:
        harness.start("child", "noop")
        event = harness.until_exit("child")
        assert classify(event.evidence, event.result).kind is FailureKind.START
        assert "server.log" in event.evidence.log_tail


def test_a_server_with_threads_does_not_fork(tmp_path):
    with Harness(tmp_path, preload=("runtime_threaded",)) as harness:
        harness.start("child", "noop")
        assert harness.until_exit("child").result is not None
        notes = [e.message.text for e in harness.events if isinstance(getattr(e, "message", None), Note)]
        assert len(notes) == 1 and "2 threads" in notes[0]


def test_a_start_that_hangs_is_repeated_in_a_fresh_interpreter(tmp_path):
    here = {"STUCK": str(os.getpid())}
    limits = ChildLimits(start_s=8.0, hang_s=60.0, total_s=None, stop_grace_s=60.0)
    with Harness(tmp_path, entry="runtime_stuck:run_job", limits=limits, more_environment=here) as harness:
        folder = harness.start("child", "noop")
        event = harness.until_exit("child")
        assert event.result is not None and not event.evidence.killed_by_us
        assert harness.said("child")[0] == "note"
        assert "runtime_stuck" in (folder / "stacks.txt").read_text()


def test_a_start_that_always_hangs_is_a_failed_start(tmp_path):
    limits = ChildLimits(start_s=1.0, hang_s=60.0, total_s=None, stop_grace_s=60.0)
    stuck = {"STUCK": "always"}
    with Harness(tmp_path, entry="runtime_stuck:run_job", limits=limits, more_environment=stuck) as harness:
        harness.start("child", "noop")
        event = harness.until_exit("child")
        assert (event.evidence.killed_by_us, event.evidence.started) == ("start", False)
        assert classify(event.evidence, event.result).kind is FailureKind.START


_SLEEPER = """
import sys, time
from pathlib import Path
from dryfit.processes import supervisor
from dryfit.processes.child_spec import ChildLimits
from runtime_jobs import Harness
supervisor._TICK_MAX_S = 0.2
limits = ChildLimits(start_s=60.0, hang_s=1.5, total_s=None, stop_grace_s=60.0)
with Harness(Path(sys.argv[1]), limits=limits) as harness:
    harness.start("child", "run")
    harness.until_said("child", "started")
    print(next(e.message.pid for e in harness.events if e.message.type == "started"), flush=True)
    end = harness.until_exit("child")
    print(repr(end.evidence.killed_by_us), end.result is not None, flush=True)
"""


def test_a_machine_that_slept_kills_nobody(tmp_path):
    """All processes stopped together, for longer than any limit, as in a suspend or a frozen job."""
    here = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    command = [sys.executable, "-c", _SLEEPER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as control:
        child = int(control.stdout.readline())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            # Asleep: the child first, so that its silence is as long as the other's. Awake: it comes last.
            first, second = (child, control.pid) if number == signal.SIGSTOP else (control.pid, child)
            os.kill(first, number)
            os.kill(second, number)
            time.sleep(2.0)
        assert alive(child), "the supervisor's clock stood while it did not run"
        (tmp_path / "child" / "stop").touch()
        assert control.stdout.readline().split() == ["''", "True"]


def test_nobody_survives_a_killed_control_process(tmp_path):
    here = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    command = [sys.executable, "-c", _CONTROL, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as control:
        server, child, plain, chained = (int(word) for word in control.stdout.readline().split())
        try:
            assert all(alive(pid) for pid in (server, child, plain, chained))
        finally:
            control.kill()
        assert until_dead(server, child, chained)
    # A descendant that set no death signal of its own is what the sweep is for.
    assert sweep(f"test-{tmp_path}") in ([plain], [])
    assert until_dead(plain)


def test_the_sweep_kills_exactly_the_marked(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(command, env={**os.environ, MARKER_VARIABLE: f"swept-{tmp_path}"})
    other = subprocess.Popen(command, env={**os.environ, MARKER_VARIABLE: f"other-{tmp_path}"})
    try:
        assert sweep(f"swept-{tmp_path}") == [ours.pid]
        assert sweep(f"swept-{tmp_path}") == []
        assert alive(other.pid)
        assert not alive(ours.pid)
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_children_leave_no_trace_in_the_server(tmp_path):
    def held(pid: int) -> tuple[int, int]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return len(os.listdir(f"/proc/{pid}/fd")), len(children)

    with Harness(tmp_path) as harness:
        harness.start("first", "noop")
        harness.until_exit("first")
        server = harness.supervisor.server_pid
        assert server is not None
        ours, before = len(os.listdir("/proc/self/fd")), held(server)
        for number in range(examples(200)):
            harness.start(f"child{number}", "noop")
            assert harness.until_exit(f"child{number}").result is not None
        assert harness.supervisor.server_pid == server
        assert held(server) == before and before[1] == 0
        assert len(os.listdir("/proc/self/fd")) == ours
