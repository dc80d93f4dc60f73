"""Each row of the fault table, by an example of what it is for."""

import signal
from dataclasses import replace

import pytest

from dryfit.processes.child import ChildStatus, describe_fault
from dryfit.processes.failure_texts import FaultCase
from dryfit.processes.failures import ROWS, classify
from dryfit.settings.errors import ChildFault, Evidence, FailureKind
from dryfit.settings.jobs import ChildResult
from dryfit.settings.plan_messages import PlanResult
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.wire import Job

OOM_HOST = FailureKind.OOM_HOST


def fault(*types: str, code: str = "", message: str = "boom") -> Evidence:
    return Evidence(exit_code=1, fault=ChildFault(types or ("builtins.RuntimeError",), code, message))


def no_space(message: str, **known: int) -> Evidence:
    return replace(fault("builtins.OSError[ENOSPC]", "builtins.OSError", message=message), **known)


def reading_a_checkpoint(message: str, *types: str) -> Evidence:
    trace = f'  File "loop.py", line 191, in _load_from_checkpoint\n    load(path)\n{message}'
    return Evidence(exit_code=1, fault=ChildFault(types or ("builtins.RuntimeError",), "", message, trace))


def aborted(log: str, **known: object) -> Evidence:
    return replace(Evidence(signal=signal.SIGABRT, log_tail=log), **known)


def stopped(by: StopReason) -> ChildResult:
    return ChildResult(TrainResult(value=None, best=None, steps=3, stopped_by=by))


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (fault(code="DATA"), FailureKind.DATA),
        (fault(code="CONFIG"), FailureKind.CONFIG),
        (fault(code="LOAD"), FailureKind.CONFIG),
        (fault(code="INTERNAL"), FailureKind.INTERNAL),
        (fault("dryfit.settings.errors.NonFiniteError", code="NONFINITE"), FailureKind.NONFINITE),
        (fault("torch.OutOfMemoryError", "builtins.RuntimeError"), FailureKind.OOM_DEVICE),
        (fault(message="CUDA out of memory. Tried to allocate 2 GiB"), FailureKind.OOM_DEVICE),
        (replace(fault("torch.OutOfMemoryError"), phase="evaluate"), FailureKind.OOM_DEVICE),
        (fault("builtins.MemoryError"), FailureKind.OOM_HOST),
        (fault(message="[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"), FailureKind.OOM_HOST),
        (fault("builtins.OSError[ENOSPC]", "builtins.OSError"), FailureKind.DISK_FULL),
        (fault(message="I/O error: No space left on device (os error 28)"), FailureKind.DISK_FULL),
        (fault("httpx2.ConnectTimeout", "httpx2.TransportError"), FailureKind.NETWORK),
        (fault("dryfit.settings.errors.DataError", "builtins.ConnectionError", code="DATA"), FailureKind.NETWORK),
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
        (Evidence(exit_code=ChildStatus.DISK_FULL, disk_full=True), FailureKind.DISK_FULL),
        (Evidence(exit_code=1, started=False), FailureKind.START),
        (Evidence(exit_code=0), FailureKind.KILLED),
        (Evidence(), FailureKind.KILLED),
        (fault(code="POISONED"), FailureKind.POISONED),
        (
            fault("dryfit.settings.errors.PoisonedError", "builtins.OSError[ENOSPC]", code="POISONED"),
            FailureKind.POISONED,
        ),
        (fault(code="CHANGED"), FailureKind.CHANGED),
        (fault(code="CORRUPT"), FailureKind.CHECKPOINT_CORRUPT),
        (fault(code="CHECKPOINT"), FailureKind.CONFIG),
        (reading_a_checkpoint("PytorchStreamReader failed reading zip archive"), FailureKind.CHECKPOINT_CORRUPT),
        (reading_a_checkpoint("boom", "builtins.EOFError"), FailureKind.CHECKPOINT_CORRUPT),
        (reading_a_checkpoint("boom", "builtins.KeyError"), FailureKind.USER_CODE),
        (fault(message="PytorchStreamReader failed reading zip archive"), FailureKind.USER_CODE),
        (fault("builtins.OSError[ENOMEM]", "builtins.OSError"), FailureKind.OOM_HOST),
        (fault(message="CUDA error: uncorrectable ECC error encountered"), FailureKind.DEVICE_LOST),
        (fault(message="CUDA error: all CUDA-capable devices are busy or unavailable"), FailureKind.DEVICE_LOST),
        (fault(message="CUDA error: CUDA-capable device(s) is/are busy or unavailable"), FailureKind.DEVICE_LOST),
        (fault(message="No CUDA GPUs are available"), FailureKind.USER_CODE),
        (replace(fault(message="No CUDA GPUs are available"), device="1"), FailureKind.DEVICE_LOST),
        (fault(message="CUDA error: misaligned address"), FailureKind.NATIVE_CRASH),
        (fault(message="CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), FailureKind.OOM_DEVICE),
        (fault(message="CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), FailureKind.NATIVE_CRASH),
        (replace(fault(message="CUDA error: unspecified launch failure"), xids=(79,)), FailureKind.DEVICE_LOST),
        (replace(fault(message="CUDA error: unspecified launch failure"), xids=(13, 31)), FailureKind.NATIVE_CRASH),
        (replace(fault(code="DATA"), xids=(79,)), FailureKind.DATA),
        (Evidence(signal=9, killed_by_us="hang", xids=(119,)), FailureKind.DEVICE_LOST),
        (Evidence(signal=9, killed_by_us="now", xids=(119,)), FailureKind.INTERRUPTED),
        (Evidence(signal=9, server_lost=True, xids=(119,)), FailureKind.LOST),
        (fault("torch.distributed.DistBackendError", "torch.distributed.DistError"), FailureKind.COMM),
        (
            fault(message="[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
            FailureKind.COMM,
        ),
        (fault(message="DataLoader worker (pid 7) is killed by signal: Bus error. It is"), FailureKind.SHM_FULL),
        (
            fault(message="unable to write to file </torch_12_34_0>: No space left on device (28)"),
            FailureKind.SHM_FULL,
        ),
        (fault(message="unable to allocate shared memory(shm) for file </torch_1_2_0>"), FailureKind.SHM_FULL),
        (fault("builtins.OSError[EMFILE]", message="[Errno 24] Too many open files"), FailureKind.SHM_FULL),
        (no_space("[Errno 28] No space left on device: '/dev/shm/psm_1'"), FailureKind.SHM_FULL),
        (no_space("[Errno 28] No space left on device: '/home/me/step-1'"), FailureKind.DISK_FULL),
        (
            no_space("[Errno 28] No space left on device", shm_free_bytes=1 << 20, disk_free_bytes=1 << 40),
            FailureKind.SHM_FULL,
        ),
        (
            no_space("[Errno 28] No space left on device: '/dev/shm/study/x'", disk_free_bytes=4096),
            FailureKind.DISK_FULL,
        ),
        (Evidence(signal=signal.SIGBUS, shm_free_bytes=1 << 20), FailureKind.SHM_FULL),
        (Evidence(signal=signal.SIGBUS, shm_free_bytes=1 << 40), FailureKind.NATIVE_CRASH),
        (Evidence(signal=signal.SIGBUS), FailureKind.NATIVE_CRASH),
        (fault(message="DataLoader worker (pid(s) 7) exited unexpectedly"), FailureKind.NATIVE_CRASH),
        (replace(fault(message="DataLoader worker (pid(s) 7) exited unexpectedly"), oom_kills_rose=True), OOM_HOST),
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
        (fault("dryfit.settings.errors.TraceError", code="TRACE"), FailureKind.PLANNER),
        (fault("builtins.MemoryError"), FailureKind.PLANNER),
        (fault("builtins.AssertionError", code="INTERNAL"), FailureKind.PLANNER),
        (Evidence(signal=signal.SIGSEGV), FailureKind.PLANNER),
        (Evidence(signal=9, oom_kills_rose=True), FailureKind.PLANNER),
        (Evidence(signal=9, killed_by_us="hang"), FailureKind.PLANNER),
        (Evidence(signal=9, killed_by_us="start", started=False), FailureKind.PLANNER),
        (Evidence(exit_code=70), FailureKind.PLANNER),
        (Evidence(signal=9, killed_by_us="now"), FailureKind.INTERRUPTED),
        (Evidence(server_lost=True), FailureKind.LOST),
        (Evidence(exit_code=ChildStatus.DISK_FULL, disk_full=True), FailureKind.DISK_FULL),
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
    result = ChildResult(PlanResult(answers=()))
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


def test_what_was_said_is_one_line_of_the_exception_or_of_the_log(golden):
    assertion = "device-side assert triggered"
    ends = [
        fault("builtins.OSError[ENOTDIR]", "builtins.OSError", message="\nno folder\nmore"),
        fault("dryfit.settings.errors.DataError", code="DATA", message="reading rows: none"),
        fault("mine.Silent", message=""),
        fault(message="of no type"),
        *(aborted(log) for log in (f"before\nCUDA error: {assertion}\nafter", f"{assertion}\nafter", "no such text")),
    ]
    golden("status", [classify(one, None).sentence for one in ends])


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
        (Evidence(exit_code=int(ChildStatus.DISK_FULL), disk_full=True), FailureKind.DISK_FULL, "no space left"),
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


WATCHDOG = (
    "[rank0]:[E709 17:05:39 ProcessGroupNCCL.cpp:698] [Rank 0] To avoid data inconsistency, we are taking the entire "
    "process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: "
)


@pytest.mark.parametrize(
    ("evidence", "kind", "said"),
    [
        (
            aborted(WATCHDOG + "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=20585)"),
            FailureKind.COMM,
            "Watchdog caught",
        ),
        (aborted(WATCHDOG + "CUDA error: uncorrectable ECC error encountered"), FailureKind.DEVICE_LOST, "ECC"),
        (aborted(WATCHDOG + "CUDA error: device-side assert triggered"), FailureKind.DEVICE_ASSERT, "device-side"),
        (
            aborted("Loss.cu:242: nll_loss: block: [0,0,0], thread: [3,0,0] Assertion `t < n_classes` failed.\n"),
            FailureKind.DEVICE_ASSERT,
            "t < n_classes",
        ),
        (aborted("terminate called after throwing an instance of 'std::bad_alloc'"), OOM_HOST, "bad_alloc"),
        (
            aborted(
                "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
                "memory (shm).",
                signal=int(signal.SIGBUS),
            ),
            FailureKind.SHM_FULL,
            "bus error",
        ),
        (aborted("free(): invalid pointer"), FailureKind.NATIVE_CRASH, "SIGABRT"),
        # What anybody printed proves nothing where something else explains the end.
        (aborted("CUDA error: device-side assert triggered", signal=9), FailureKind.KILLED, "SIGKILL"),
        (aborted("NCCL error", signal=9, killed_by_us="hang"), FailureKind.HANG, "no sign of life"),
        (aborted("NCCL error", server_lost=True), FailureKind.LOST, "lost with"),
        (Evidence(exit_code=0, log_tail="CUDA error: device-side assert triggered"), FailureKind.KILLED, "last word"),
    ],
)
def test_the_log_is_asked_last_and_only_of_what_native_code_ended(evidence, kind, said):
    failure = classify(evidence, None)
    assert failure.kind is kind
    assert said in failure.sentence


def test_nobody_asks_a_planner_s_log():
    evidence = aborted("CUDA error: device-side assert triggered")
    assert classify(evidence, None, job=Job.PLAN).kind is FailureKind.PLANNER


def test_the_numbers_of_the_driver_are_told():
    assert "Xid 79: GPU has fallen off the bus" in classify(Evidence(signal=6, xids=(13, 79, 79)), None).sentence


# The sentence of torch 2.x on a device that others use, as it was posted.
SHARED_DEVICE = (
    "CUDA out of memory. Tried to allocate 56.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which 20.75 MiB is "
    "free. Process 3441597 has 2.54 GiB memory in use. Process 2618016 has 274.00 MiB memory in use. Including "
    "non-PyTorch memory, this process has 4.41 GiB memory in use. Of the allocated memory 3.90 GiB is allocated by "
    "PyTorch, and 220.70 MiB is reserved by PyTorch but unallocated."
)
GIB = 2**30


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        ({"planned_bytes": 6 * GIB}, FailureKind.OOM_NEIGHBOUR),  # it took 4.4, was promised 6, and 5 were there
        ({"planned_bytes": 4 * GIB}, FailureKind.OOM_DEVICE),  # it took more than was planned
        ({"planned_bytes": 5 * GIB - 10**9}, FailureKind.OOM_DEVICE),  # what was promised was there
        ({"planned_bytes": 8 * GIB}, FailureKind.OOM_DEVICE),  # the whole device has less
        ({"planned_bytes": 6 * GIB, "peak_bytes": 7 * GIB}, FailureKind.OOM_DEVICE),  # it was seen to take more
        ({}, FailureKind.OOM_NEIGHBOUR),  # no plan, and neighbours hold more than a third
    ],
)
def test_who_took_the_memory(known, kind):
    evidence = replace(fault("torch.OutOfMemoryError", message=SHARED_DEVICE), **known)
    assert classify(evidence, None).kind is kind


def test_neighbours_are_seen_without_a_word_of_torch():
    evidence = replace(
        fault("torch.OutOfMemoryError", message="CUDA out of memory"),
        planned_bytes=10 * GIB,
        peak_bytes=3 * GIB,
        device_total_bytes=24 * GIB,
        neighbour_bytes=20 * GIB,
    )
    failure = classify(evidence, None)
    assert failure.kind is FailureKind.OOM_NEIGHBOUR
    assert "planned 10.0 GiB, taken 3.0 GiB, held by others 20.0 GiB, of 24.0 GiB" in failure.sentence
    assert classify(replace(evidence, neighbour_bytes=2 * GIB), None).kind is FailureKind.OOM_DEVICE
    assert classify(replace(evidence, neighbour_bytes=None), None).kind is FailureKind.OOM_DEVICE


def test_every_text_is_found_by_its_row():
    for row in ROWS:
        for one in row.texts:
            trace = "  File 'x', line 1, in _load_from_checkpoint"  # of use to one row, harmless to the others
            evidence = Evidence(exit_code=1, device="0", fault=ChildFault(("builtins.RuntimeError",), "", one, trace))
            assert row.matches(FaultCase(evidence, None)) or row.kind in NEEDS_MORE, one


NEEDS_MORE = {FailureKind.OOM_NEIGHBOUR, FailureKind.OOM_DEVICE}
"""Kinds of whose rows some ask more than a text: who holds the memory, and whose function it is."""
