"""Each row of the fault table, by an example of what it is for."""

import signal

import pytest

from dryfit.core.failure import ChildFault, Evidence, FailureKind
from dryfit.core.jobs import ChildResult, Job, PlanResult, StopReason, TrainResult
from dryfit.runtime.child import ChildStatus, describe_fault
from dryfit.runtime.faults import ROWS, classify


def fault(*types: str, code: str = "", message: str = "boom") -> Evidence:
    return Evidence(exit_code=1, fault=ChildFault(types or ("builtins.RuntimeError",), code, message))


def stopped(by: StopReason) -> ChildResult:
    return ChildResult(train=TrainResult(value=None, best=None, steps=3, stopped_by=by))


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (fault(code="DATA"), FailureKind.DATA),
        (fault(code="CONFIG"), FailureKind.CONFIG),
        (fault(code="LOAD"), FailureKind.CONFIG),
        (fault(code="INTERNAL"), FailureKind.INTERNAL),
        (fault("dryfit.core.errors.NonFiniteError", code="NONFINITE"), FailureKind.NONFINITE),
        (fault("torch.OutOfMemoryError", "builtins.RuntimeError"), FailureKind.OOM_DEVICE),
        (fault(message="CUDA out of memory. Tried to allocate 2 GiB"), FailureKind.OOM_DEVICE),
        (fault("builtins.MemoryError"), FailureKind.OOM_HOST),
        (fault(message="[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"), FailureKind.OOM_HOST),
        (fault("builtins.OSError[ENOSPC]", "builtins.OSError"), FailureKind.DISK_FULL),
        (fault(message="I/O error: No space left on device (os error 28)"), FailureKind.DISK_FULL),
        (fault("httpx2.ConnectTimeout", "httpx2.TransportError"), FailureKind.NETWORK),
        (fault("dryfit.core.errors.DataError", "builtins.ConnectionError", code="DATA"), FailureKind.NETWORK),
        (
            fault("huggingface_hub.errors.OfflineModeIsEnabled", "builtins.ConnectionError"),
            FailureKind.CONFIG,
        ),
        (
            fault("huggingface_hub.errors.RepositoryNotFoundError", "httpx2.HTTPError", message="404 Client Error"),
            FailureKind.USER_CODE,
        ),
        (
            fault("builtins.NotImplementedError", message="Cannot copy out of meta tensor; no data!"),
            FailureKind.POISONED,
        ),
        (fault(message="CUDA error: device-side assert triggered"), FailureKind.DEVICE_ASSERT),
        (fault(message="DataLoader worker (pid 7) is killed by signal: Killed. "), FailureKind.KILLED),
        (fault(message="CUDA error: an illegal memory access was encountered"), FailureKind.NATIVE_CRASH),
        (fault("builtins.KeyError"), FailureKind.USER_CODE),
        (Evidence(killed_by_us="start", started=False, signal=9), FailureKind.START),
        (Evidence(killed_by_us="hang", signal=9), FailureKind.HANG),
        (Evidence(killed_by_us="timeout", signal=9), FailureKind.TIMEOUT),
        (Evidence(killed_by_us="now", signal=9), FailureKind.INTERRUPTED),
        (Evidence(server_lost=True), FailureKind.LOST),
        (Evidence(signal=9), FailureKind.KILLED),
        (Evidence(signal=9, oom_kills_rose=True), FailureKind.OOM_HOST),
        (Evidence(signal=signal.SIGSEGV), FailureKind.NATIVE_CRASH),
        (Evidence(signal=signal.SIGTERM), FailureKind.PREEMPTED),
        (Evidence(signal=signal.SIGTERM, stop_asked=True), FailureKind.INTERRUPTED),
        (Evidence(exit_code=ChildStatus.DISK_FULL), FailureKind.DISK_FULL),
        (Evidence(exit_code=1, started=False), FailureKind.START),
        (Evidence(exit_code=0), FailureKind.KILLED),
        (Evidence(), FailureKind.KILLED),
    ],
)
def test_an_example_of_each_row(evidence, kind):
    failure = classify(evidence, None)
    assert failure.kind is kind
    assert failure.sentence and "{" not in failure.sentence


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (fault("builtins.KeyError"), FailureKind.PLANNER),
        (fault("dryfit.core.errors.TraceError", code="TRACE"), FailureKind.PLANNER),
        (fault("builtins.MemoryError"), FailureKind.PLANNER),
        (fault("builtins.AssertionError", code="INTERNAL"), FailureKind.PLANNER),
        (Evidence(signal=signal.SIGSEGV), FailureKind.PLANNER),
        (Evidence(signal=9, oom_kills_rose=True), FailureKind.PLANNER),
        (Evidence(signal=9, killed_by_us="hang"), FailureKind.PLANNER),
        (Evidence(signal=9, killed_by_us="start", started=False), FailureKind.PLANNER),
        (Evidence(exit_code=70), FailureKind.PLANNER),
        (Evidence(signal=9, killed_by_us="now"), FailureKind.INTERRUPTED),
        (Evidence(server_lost=True), FailureKind.LOST),
        (Evidence(exit_code=ChildStatus.DISK_FULL), FailureKind.DISK_FULL),
        (fault("builtins.OSError[ENOSPC]", "builtins.OSError"), FailureKind.DISK_FULL),
        (fault("httpx2.ConnectTimeout", "httpx2.TransportError"), FailureKind.NETWORK),
    ],
)
def test_whatever_ends_a_planner_is_its_own_failure(evidence, kind):
    """Unless the machine or the network is to blame: the trial it planned is not."""
    failure = classify(evidence, None, job=Job.PLAN)
    assert failure.kind is kind
    assert failure.sentence and "{" not in failure.sentence


def test_a_finished_planner_is_no_failure_of_a_planner():
    result = ChildResult(plan=PlanResult(answers=()))
    assert classify(Evidence(exit_code=0), result, job=Job.PLAN).kind is FailureKind.INTERNAL


def test_every_kind_has_a_row():
    assert {row.kind for row in ROWS} == set(FailureKind)


def test_a_training_result_says_who_stopped_it():
    assert classify(Evidence(exit_code=0), stopped(StopReason.REQUEST)).kind is FailureKind.INTERRUPTED
    assert classify(Evidence(exit_code=0), stopped(StopReason.SIGTERM)).kind is FailureKind.PREEMPTED
    assert classify(Evidence(exit_code=0), stopped(StopReason.VERDICT)).kind is FailureKind.INTERNAL


def test_the_result_s_own_fault_is_used_where_the_evidence_has_none():
    result = ChildResult(fault=ChildFault(("builtins.MemoryError",), "", ""))
    assert classify(Evidence(exit_code=1, killed_by_us="hang"), result).kind is FailureKind.OOM_HOST


def test_braces_in_a_message_are_left_alone():
    assert "{status}" in classify(fault(message="bad {status} {0}"), None).sentence


def test_a_chain_with_a_circle_and_a_huge_message_is_described():
    first, second = ValueError("x" * 100_000), KeyError("k")
    first.__cause__, second.__cause__ = second, first
    described = describe_fault(first)
    assert described.type_names == (
        "builtins.ValueError",
        "builtins.Exception",
        "builtins.BaseException",
        "builtins.KeyError",
        "builtins.LookupError",
    )
    assert len(described.message) == 4_000 and len(described.traceback) <= 16_000


@pytest.mark.parametrize(
    ("evidence", "kind", "said"),
    [
        (fault(code="OBJECTIVE", message="it is None"), FailureKind.USER_CODE, "it is None"),
        (Evidence(exit_code=0), FailureKind.USER_CODE, "it ended its own process (exit status 0)"),
        (Evidence(exit_code=5), FailureKind.USER_CODE, "it ended its own process (exit status 5)"),
        (Evidence(exit_code=0, started=False), FailureKind.START, "before its first line"),
        (Evidence(exit_code=int(ChildStatus.NO_LAST_WORD)), FailureKind.KILLED, "without a last word"),
        (Evidence(exit_code=int(ChildStatus.DISK_FULL)), FailureKind.DISK_FULL, "no space left"),
        (fault("torch.OutOfMemoryError"), FailureKind.OOM_DEVICE, "the device's memory did not suffice (torch"),
        (Evidence(signal=9), FailureKind.KILLED, "killed from outside"),
    ],
)
def test_ends_of_a_function_of_the_users_own(evidence, kind, said):
    failure = classify(evidence, None, job=Job.OBJECTIVE)
    assert failure.kind is kind
    assert said in failure.sentence
    assert "execution." not in failure.sentence


def test_only_a_function_of_the_users_own_ends_itself():
    assert classify(Evidence(exit_code=0), None).kind is FailureKind.KILLED
