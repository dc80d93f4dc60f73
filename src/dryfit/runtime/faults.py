"""From evidence to exactly one kind of failure: a table of rows, the first that matches wins."""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dryfit.core.failure import ChildFault, Evidence, Failure, FailureKind
from dryfit.core.jobs import ChildResult, Job, StopReason
from dryfit.runtime.child import ChildStatus

CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})
"""What ends a process whose native code broke."""

_ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
_SAYING_MAX_CHARS = 300


@dataclass(frozen=True, slots=True)
class Case:
    """What a row looks at. ``fault`` is the evidence's, or the result's where that has none."""

    evidence: Evidence
    result: ChildResult | None
    fault: ChildFault | None
    job: Job = Job.TRAIN

    @property
    def stopped_by(self) -> StopReason | None:
        """Why training ended early, if a training result says so."""
        return self.result.train.stopped_by if self.result is not None and self.result.train is not None else None


Test = Callable[[Case], bool]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of failure.

    Attributes:
        kind: What it is called.
        matches: Whether a case is one.
        sentence: What to tell; ``{said}`` is what the child said last, ``{status}`` how it ended.
    """

    kind: FailureKind
    matches: Test
    sentence: str


def _code(*codes: str) -> Test:
    return lambda case: case.fault is not None and case.fault.code in codes


def _type(*names: str) -> Test:
    """An exception of the chain is one of these, or of a subclass."""
    return lambda case: case.fault is not None and not set(names).isdisjoint(case.fault.type_names)


def _text(*texts: str) -> Test:
    """The last resort: libraries that say it only in words. Every use names its source."""
    return lambda case: (
        case.fault is not None and any(text in case.fault.message or text in case.fault.traceback for text in texts)
    )


def _signal(numbers: Iterable[int]) -> Test:
    wanted = frozenset(numbers)
    return lambda case: case.evidence.signal in wanted


def _killed(why: str) -> Test:
    return lambda case: case.evidence.killed_by_us == why


def _any(*tests: Test) -> Test:
    return lambda case: any(test(case) for test in tests)


def _all(*tests: Test) -> Test:
    return lambda case: all(test(case) for test in tests)


def _stop_asked(case: Case) -> bool:
    return case.evidence.stop_asked


def _oom_rose(case: Case) -> bool:
    return case.evidence.oom_kills_rose


def _has_result(case: Case) -> bool:
    result = case.result
    if result is None:
        return False
    return any(one is not None for one in (result.train, result.resolve, result.plan, result.imported))


def _has_fault(case: Case) -> bool:
    return case.fault is not None


def _plans(case: Case) -> bool:
    return case.job is Job.PLAN


def _calls_own_function(case: Case) -> bool:
    return case.job is Job.OBJECTIVE


def _left_by_itself(case: Case) -> bool:
    """It ended with a status that is not ours: its own code did that, and would do it again."""
    ours = (ChildStatus.DISK_FULL, ChildStatus.NO_LAST_WORD)
    return case.evidence.started and case.evidence.exit_code is not None and case.evidence.exit_code not in ours


_OFFLINE = "huggingface_hub.errors.OfflineModeIsEnabled"

_NETWORK_TYPES = (
    "builtins.ConnectionError",
    "builtins.TimeoutError",
    "socket.gaierror",
    "http.client.IncompleteRead",
    "urllib.error.URLError",
    "urllib3.exceptions.HTTPError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "requests.exceptions.ChunkedEncodingError",
    "httpx.TransportError",
    "httpx2.TransportError",
    "aiohttp.client_exceptions.ClientConnectionError",
)

_NETWORK_TEXTS = (
    "We couldn't connect to '",  # transformers utils/hub.py, cached_files
    "Server Error for url",  # huggingface_hub and requests, raise_for_status of 5xx
    "429 Too Many Requests",  # the same, the hub's rate limit
)

_DISK_TEXTS = (
    "(os error 28)",  # Rust's io::Error for ENOSPC, e.g. in safetensors' SafetensorError
    "(os error 122)",  # the same for EDQUOT
    "PytorchStreamWriter failed writing file",  # torch caffe2/serialize/inline_container.cc
)

_HOST_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # torch c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same file
)

_DEVICE_MEMORY_TEXTS = (
    "CUDA out of memory. Tried to allocate",  # torch c10/cuda/CUDACachingAllocator.cpp, passed on as RuntimeError
    "CUDA error: out of memory",  # CUDA's cudaErrorMemoryAllocation, outside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",  # torch aten/src/ATen/cuda/Exceptions.cpp
)

_NATIVE_TEXTS = (
    "an illegal memory access was encountered",  # CUDA runtime, cudaErrorIllegalAddress
    "unspecified launch failure",  # CUDA runtime, cudaErrorLaunchFailure
)

_OUT_OF_DEVICE_MEMORY = _any(_type("torch.OutOfMemoryError"), _text(*_DEVICE_MEMORY_TEXTS))

# torch/utils/data: DataLoader tells of a worker's death by signal in words only.
_WORKER_KILLED = _text("is killed by signal: Killed")
_WORKER_CRASHED = _text(
    "is killed by signal: Segmentation fault", "is killed by signal: Aborted", "is killed by signal: Bus error"
)

ROWS: tuple[Row, ...] = (
    # A last word that was asked for, by us or by somebody else.
    Row(
        FailureKind.INTERRUPTED,
        lambda case: case.stopped_by is StopReason.REQUEST,
        "stopped as asked; it goes on from its checkpoint",
    ),
    Row(
        FailureKind.PREEMPTED,
        lambda case: case.stopped_by is StopReason.SIGTERM,
        "stopped by a SIGTERM from outside; it goes on from its checkpoint",
    ),
    Row(FailureKind.INTERNAL, _has_result, "a finished child was taken for a failed one"),
    # What the child itself said: no later kill can have put these words into its mouth.
    Row(FailureKind.POISONED, _code("POISONED"), "{said}"),
    Row(FailureKind.NONFINITE, _type("dryfit.core.errors.NonFiniteError"), "{said}"),
    Row(FailureKind.NONFINITE, _code("NONFINITE"), "{said}"),
    Row(
        FailureKind.DISK_FULL,
        _any(_type("builtins.OSError[ENOSPC]", "builtins.OSError[EDQUOT]"), _text(*_DISK_TEXTS)),
        "no space left on the disk or quota reached; free some, then resume ({said})",
    ),
    Row(FailureKind.CONFIG, _type(_OFFLINE), "offline, and not in the cache: {said}"),
    Row(FailureKind.NETWORK, _any(_type(*_NETWORK_TYPES), _text(*_NETWORK_TEXTS)), "the network failed: {said}"),
    # Whatever else ends a planner, a trial's memory is unknown then, and nothing is wrong with the trial itself.
    Row(FailureKind.PLANNER, _all(_plans, _has_fault), "planning its memory failed: {said}"),
    Row(FailureKind.DATA, _code("DATA"), "{said}"),
    Row(FailureKind.CONFIG, _code("CONFIG", "LOAD", "MACHINE", "CHECKPOINT"), "{said}"),
    Row(FailureKind.USER_CODE, _code("OBJECTIVE"), "{said}"),
    Row(
        FailureKind.OOM_DEVICE,
        _all(_calls_own_function, _OUT_OF_DEVICE_MEMORY),
        "the device's memory did not suffice ({said})",
    ),
    Row(
        FailureKind.OOM_DEVICE,
        _OUT_OF_DEVICE_MEMORY,
        "the device's memory did not suffice; lower execution.micro_batch ({said})",
    ),
    Row(
        FailureKind.OOM_HOST,
        _any(_type("builtins.MemoryError"), _text(*_HOST_MEMORY_TEXTS), _all(_WORKER_KILLED, _oom_rose)),
        "the machine's memory did not suffice; lower runtime.parallel or execution.loader_workers ({said})",
    ),
    Row(
        FailureKind.POISONED,
        _text("Cannot copy out of meta tensor"),  # torch/nn/modules/module.py, Module.to
        "the process's torch was left in a bad state: {said}",
    ),
    Row(
        FailureKind.DEVICE_ASSERT,
        _text("device-side assert triggered"),  # CUDA runtime, cudaErrorAssert
        "a kernel's assertion failed, most often a label or token id out of range: {said}",
    ),
    Row(FailureKind.KILLED, _WORKER_KILLED, "a data loader's worker was killed from outside: {said}"),
    Row(
        FailureKind.NATIVE_CRASH,
        _any(_WORKER_CRASHED, _text(*_NATIVE_TEXTS)),
        "native code crashed: {said}",
    ),
    Row(
        FailureKind.INTERNAL,
        lambda case: case.fault is not None and bool(case.fault.code),
        "an invariant of dryfit broke; please report it: {said}",
    ),
    Row(FailureKind.USER_CODE, _has_fault, "an exception ended it: {said}"),
    # It said nothing. What we did, and what happened around it.
    Row(FailureKind.INTERRUPTED, _killed("now"), "stopped at once; it goes on from its last checkpoint"),
    Row(FailureKind.LOST, lambda case: case.evidence.server_lost, "lost with the process that ran it"),
    Row(
        FailureKind.PLANNER,
        _all(_plans, _any(*(_killed(why) for why in ("start", "hang", "timeout")))),
        "planning its memory took too long",
    ),
    Row(FailureKind.START, _killed("start"), "gave no first line in time; see its log"),
    Row(FailureKind.HANG, _killed("hang"), "gave no sign of life for {beat}; its stacks are in stacks.txt"),
    Row(FailureKind.TIMEOUT, _killed("timeout"), "took longer than runtime.trial_timeout_s"),
    Row(
        FailureKind.INTERRUPTED,
        _all(_stop_asked, _signal(_ASKED_TO_END)),
        "stopped as asked, before it could write a checkpoint",
    ),
    # Only the operating system's word is left.
    Row(
        FailureKind.DISK_FULL,
        lambda case: case.evidence.exit_code == ChildStatus.DISK_FULL,
        "no space left on the disk, not even for its last word; free some, then resume",
    ),
    Row(FailureKind.PLANNER, _plans, "planning its memory ended without an answer ({status})"),
    Row(
        FailureKind.USER_CODE,
        _all(_calls_own_function, _left_by_itself),
        "it ended its own process ({status}) instead of returning a number",
    ),
    Row(
        FailureKind.OOM_HOST,
        _all(_signal({signal.SIGKILL}), _oom_rose),
        "killed for want of memory; lower runtime.parallel or execution.loader_workers",
    ),
    Row(FailureKind.KILLED, _signal({signal.SIGKILL}), "killed from outside (SIGKILL), nobody knows why"),
    Row(FailureKind.NATIVE_CRASH, _signal(CRASH_SIGNALS), "native code crashed ({status}); see stacks.txt"),
    Row(FailureKind.PREEMPTED, _signal(_ASKED_TO_END), "ended from outside ({status})"),
    Row(
        FailureKind.START, lambda case: not case.evidence.started, "ended before its first line ({status}); see its log"
    ),
    Row(FailureKind.KILLED, lambda case: True, "ended without a last word ({status})"),
)


def _status(evidence: Evidence) -> str:
    if evidence.signal is not None:
        try:
            return signal.Signals(evidence.signal).name
        except ValueError:
            return f"signal {evidence.signal}"
    return f"exit status {evidence.exit_code}" if evidence.exit_code is not None else "nothing is known of its end"


def _said(fault: ChildFault | None) -> str:
    if fault is None:
        return ""
    first_line = next((line for line in fault.message.splitlines() if line.strip()), "")[:_SAYING_MAX_CHARS]
    if fault.code or not fault.type_names:
        return first_line or "no message"
    name = next((name for name in fault.type_names if not name.endswith("]")), fault.type_names[0])
    short = name.removeprefix("builtins.")
    return f"{short}: {first_line}" if first_line else short


def classify(evidence: Evidence, result: ChildResult | None, *, job: Job = Job.TRAIN) -> Failure:
    """Name the failure that ended an attempt.

    Args:
        evidence: What is known of the end.
        result: The child's last word, if any.
        job: What the child was for.

    Returns:
        Exactly one kind for any evidence, and a sentence.
    """
    fault = evidence.fault or (result.fault if result is not None else None)
    case = Case(evidence, result, fault, job)
    row = next(row for row in ROWS if row.matches(case))
    sentence = row.sentence.format(said=_said(fault), status=_status(evidence), beat=f"{evidence.beat_age_s:.0f} s")
    return Failure(row.kind, sentence)
