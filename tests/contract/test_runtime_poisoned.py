"""A process whose torch was changed: its answer is not taken, and a fork server that hands it on heals by itself."""

import sys

import pytest

from dryfit.processes.child_spec import ChildExited, ChildMessage
from dryfit.processes.failures import classify, decide_recovery
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import TrainResult
from dryfit.settings.wire import Note
from runtime_jobs import Harness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")


def harness(folder, poison_at: str, **more) -> Harness:
    preload = ("runtime_poisoned", "runtime_jobs")
    return Harness(folder, preload=preload, more_environment={"POISON_AT": poison_at}, **more)


def test_a_poisoned_server_heals_by_itself(tmp_path):
    """Each child is answered, at the latest by a fresh interpreter; in the end no server is asked any more."""
    with harness(tmp_path, "start") as opened:
        servers = set()
        for number in range(4):
            opened.start(f"child{number}", "noop")
            event = opened.until_exit(f"child{number}")
            assert event.result is not None and isinstance(event.result.answer, TrainResult), event
            servers.add(opened.supervisor.server_pid)
        notes = [e.message.text for e in opened.events if isinstance(getattr(e, "message", None), Note)]
        assert notes == ["the forked child found its torch changed: started again in a fresh interpreter"] * 3
        assert len(servers) > 2, "a new server is tried before it is given up"


def test_a_poisoned_server_is_left_to_those_that_run_and_replaced_behind_them(tmp_path):
    with harness(tmp_path, "start") as opened:
        opened.start("long", "run")  # poisoned as well, so it runs in an interpreter of its own
        opened.until_said("long", "started")
        first = opened.supervisor.server_pid
        opened.start("next", "noop")
        assert opened.until_exit("next").result is not None
        assert opened.supervisor.server_pid != first
        opened.supervisor.ask_stop("long")
        assert opened.until_exit("long").result is not None


def test_where_a_server_is_demanded_the_trial_is_told_and_retried(tmp_path):
    with harness(tmp_path, "start", isolation=Isolation.FORKSERVER) as opened:
        opened.start("child", "noop")
        event = opened.until_exit("child")
        failure = classify(event.evidence, event.result)
        assert failure.kind is FailureKind.POISONED
        assert not event.evidence.started
        assert decide_recovery(failure, (), retries=0).action is Action.RETRY, "outside the budget"
        first = opened.supervisor.server_pid
        opened.start("again", "noop")
        opened.until_exit("again")
        assert opened.supervisor.server_pid != first


@pytest.mark.parametrize(
    ("job", "kind", "told"),
    [
        ("end", FailureKind.POISONED, "ending the job train"),
        ("raise", FailureKind.POISONED, "looking for the cause of RuntimeError"),
        ("known", FailureKind.DATA, "reading rows"),
    ],
)
def test_what_a_process_did_after_it_was_changed_is_not_taken(tmp_path, job, kind, told):
    with harness(tmp_path, "late", entry="runtime_poisoned:run_job") as opened:
        server = None
        opened.start("child", job)
        event = opened.until_exit("child")
        server = opened.supervisor.server_pid
        assert event.result is not None and event.result.answer is None and event.result.fault is not None
        assert classify(event.evidence, event.result).kind is kind
        assert event.result.fault.message.startswith(told)
        if job == "raise":
            assert event.result.fault.context == "it came to light by RuntimeError: expected Float but found BFloat16"
            assert "builtins.RuntimeError" in event.result.fault.type_names
        # The server itself is in order: the next child is its fork again.
        opened.start("next", "known")
        opened.until_exit("next")
        assert opened.supervisor.server_pid == server
        starts = [e for e in opened.events if isinstance(e, ChildMessage) and isinstance(e.message, Note)]
        assert not starts
        assert sum(isinstance(e, ChildExited) for e in opened.events) == 2
