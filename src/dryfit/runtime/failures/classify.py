"""Classifies the end of an attempt as exactly one kind of failure, by a table whose first matching row wins."""

import signal
from dataclasses import dataclass

from dryfit.core.failure import ChildFault, Evidence, Failure, FailureKind
from dryfit.core.jobs.child import ChildResult
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.train import StopReason
from dryfit.runtime.failures import fault_texts as texts
from dryfit.runtime.failures.device_memory import known_device_memory, memory_text
from dryfit.runtime.failures.fault_case import (
    CRASH_SIGNALS,
    UNREADABLE_TYPES,
    FaultCase,
    Test,
    all_of,
    any_of,
    by_signal,
    calls_own_function,
    code,
    fatal_xids,
    has_device,
    has_fault,
    has_result,
    in_shared_memory,
    killed,
    left_by_itself,
    lost_its_device,
    neighbours,
    oom_rose,
    plans,
    raised,
    resumed,
    said,
    shm_low,
    stop_asked,
    validates,
)
from dryfit.runtime.failures.fault_texts import FATAL_XIDS

_ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
_SAYING_MAX_CHARS = 300


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A row of the table: one way to recognise a kind of failure.

    Attributes:
        kind: The kind of failure.
        matches: Whether a case is of this kind.
        sentence: The message; ``{said}`` is the child's last message, ``{status}`` its exit status or signal,
            ``{beat}`` the time since its last heartbeat, ``{memory}`` the device's memory, ``{xids}`` the driver's
            errors.
        texts: The texts it is recognised by, if any.
    """

    kind: FailureKind
    matches: Test
    sentence: str
    texts: tuple[str, ...] = ()


_NO_SPACE = any_of(
    raised("builtins.OSError[ENOSPC]", "builtins.OSError[EDQUOT]", "builtins.OSError[EFBIG]"), said(*texts.DISK)
)
_OUT_OF_DEVICE_MEMORY = any_of(raised("torch.OutOfMemoryError"), said(*texts.DEVICE_MEMORY))
_WORKER_KILLED = said(*texts.WORKER_KILLED)

ROWS: tuple[FaultRow, ...] = (
    # Training stopped as asked, by us or by a signal from outside.
    FaultRow(
        FailureKind.INTERRUPTED,
        lambda case: case.stopped_by is StopReason.REQUEST,
        "stopped as asked; it goes on from its checkpoint",
    ),
    FaultRow(
        FailureKind.PREEMPTED,
        lambda case: case.stopped_by is StopReason.SIGTERM,
        "stopped by a SIGTERM from outside; it goes on from its checkpoint",
    ),
    FaultRow(FailureKind.INTERNAL, has_result, "a finished child was taken for a failed one"),
    # The child's own exception: no later kill can have caused it. In a poisoned process, any exception may follow.
    FaultRow(FailureKind.POISONED, code("POISONED"), "the process's torch was left in a bad state: {said}"),
    FaultRow(FailureKind.NONFINITE, raised("dryfit.core.errors.NonFiniteError"), "{said}"),
    FaultRow(FailureKind.NONFINITE, code("NONFINITE"), "{said}"),
    FaultRow(
        FailureKind.SHM_FULL,
        any_of(said(*texts.SHARED_MEMORY), raised("builtins.OSError[EMFILE]"), all_of(_NO_SPACE, in_shared_memory)),
        "shared memory (/dev/shm) did not suffice for the data loader's workers ({said})",
        texts.SHARED_MEMORY,
    ),
    FaultRow(
        FailureKind.DISK_FULL,
        _NO_SPACE,
        "no space left on the disk or quota reached; free some, then resume ({said})",
        texts.DISK,
    ),
    FaultRow(FailureKind.CONFIG, raised(texts.OFFLINE), "offline, and not in the cache: {said}"),
    FaultRow(
        FailureKind.NETWORK,
        all_of(
            any_of(raised(*texts.NETWORK_TYPES), said(*texts.NETWORK)), lambda case: not raised(*texts.COMM_TYPES)(case)
        ),
        "the network failed: {said}",
        texts.NETWORK,
    ),
    # Whatever else ends a planner: the trial's memory is unknown, and nothing is wrong with the trial itself.
    FaultRow(FailureKind.PLANNER, all_of(plans, has_fault), "planning its memory failed: {said}"),
    FaultRow(FailureKind.CHANGED, code("CHANGED"), "{said}"),
    FaultRow(FailureKind.DATA, code("DATA"), "{said}"),
    FaultRow(FailureKind.CHECKPOINT_CORRUPT, code("CORRUPT"), "{said}"),
    FaultRow(
        FailureKind.CHECKPOINT_CORRUPT,
        all_of(resumed, any_of(raised(*UNREADABLE_TYPES), said(*texts.CHECKPOINT))),
        "a checkpoint could not be read: {said}",
        texts.CHECKPOINT,
    ),
    FaultRow(
        FailureKind.CONFIG, code("CONFIG", "LIBRARY", "LOAD", "MACHINE", "CHECKPOINT", "SHARD", "TRACE"), "{said}"
    ),
    FaultRow(FailureKind.USER_CODE, code("OBJECTIVE"), "{said}"),
    # The device, the worst first: the consequences of a lost device look like anything else.
    FaultRow(FailureKind.DEVICE_LOST, lost_its_device, "the driver gave its device up ({xids})"),
    FaultRow(
        FailureKind.DEVICE_LOST,
        any_of(said(*texts.DEVICE_LOST), all_of(has_device, said(*texts.NO_DEVICE))),
        "its device failed or is gone: {said}",
        (*texts.DEVICE_LOST, *texts.NO_DEVICE),
    ),
    FaultRow(
        FailureKind.OOM_NEIGHBOUR,
        all_of(_OUT_OF_DEVICE_MEMORY, neighbours),
        "others held the device's memory that it needed ({memory})",
        texts.DEVICE_MEMORY,
    ),
    FaultRow(
        FailureKind.OOM_DEVICE,
        all_of(calls_own_function, _OUT_OF_DEVICE_MEMORY),
        "the device's memory did not suffice ({said})",
        texts.DEVICE_MEMORY,
    ),
    FaultRow(
        FailureKind.OOM_DEVICE,
        all_of(validates, _OUT_OF_DEVICE_MEMORY),
        "the device's memory did not suffice for a validation; lower execution.eval_batch ({said})",
        texts.DEVICE_MEMORY,
    ),
    FaultRow(
        FailureKind.OOM_DEVICE,
        _OUT_OF_DEVICE_MEMORY,
        "the device's memory did not suffice; lower execution.micro_batch ({said})",
        texts.DEVICE_MEMORY,
    ),
    FaultRow(
        FailureKind.OOM_HOST,
        any_of(
            raised("builtins.MemoryError", "builtins.OSError[ENOMEM]"),
            said(*texts.HOST_MEMORY),
            all_of(any_of(_WORKER_KILLED, said(*texts.WORKER_CRASHED)), oom_rose),
        ),
        "the machine's memory did not suffice; lower runtime.parallel or execution.loader_workers ({said})",
        texts.HOST_MEMORY,
    ),
    FaultRow(
        FailureKind.POISONED,
        said(*texts.POISONED),
        "the process's torch was left in a bad state: {said}",
        texts.POISONED,
    ),
    FaultRow(
        FailureKind.DEVICE_ASSERT,
        said(*texts.DEVICE_ASSERT),
        "a kernel's assertion failed, most often a label or token id out of range: {said}",
        texts.DEVICE_ASSERT,
    ),
    FaultRow(
        FailureKind.COMM,
        any_of(code("COMM"), raised(*texts.COMM_TYPES), said(*texts.COMM)),
        "the processes of one trial lost each other: {said}",
        texts.COMM,
    ),
    FaultRow(
        FailureKind.KILLED,
        _WORKER_KILLED,
        "a data loader's worker was killed from outside: {said}",
        texts.WORKER_KILLED,
    ),
    FaultRow(
        FailureKind.NATIVE_CRASH,
        said(*texts.WORKER_CRASHED, *texts.NATIVE),
        "native code crashed: {said}",
        (*texts.WORKER_CRASHED, *texts.NATIVE),
    ),
    FaultRow(
        FailureKind.INTERNAL,
        lambda case: case.fault is not None and bool(case.fault.code),
        "an invariant of dryfit broke; please report it: {said}",
    ),
    FaultRow(FailureKind.USER_CODE, has_fault, "an exception ended it: {said}"),
    # No exception. What we did to it, and what happened around it.
    FaultRow(FailureKind.INTERRUPTED, killed("now"), "stopped at once; it goes on from its last checkpoint"),
    FaultRow(FailureKind.LOST, lambda case: case.evidence.server_lost, "lost with the process that ran it"),
    FaultRow(
        FailureKind.PLANNER,
        all_of(plans, any_of(*(killed(why) for why in ("start", "hang", "timeout")))),
        "planning its memory took too long",
    ),
    FaultRow(FailureKind.START, killed("start"), "gave no first line in time; see its log"),
    FaultRow(FailureKind.HANG, killed("hang"), "gave no sign of life for {beat}; its stacks are in stacks.txt"),
    FaultRow(FailureKind.TIMEOUT, killed("timeout"), "took longer than runtime.trial_timeout_s"),
    FaultRow(
        FailureKind.INTERRUPTED,
        all_of(stop_asked, by_signal(_ASKED_TO_END)),
        "stopped as asked, before it could write a checkpoint",
    ),
    # Only the exit status or signal is left.
    FaultRow(
        FailureKind.DISK_FULL,
        lambda case: case.evidence.disk_full,
        "no space left on the disk, not even for its last word; free some, then resume",
    ),
    FaultRow(FailureKind.PLANNER, plans, "planning its memory ended without an answer ({status})"),
    FaultRow(
        FailureKind.USER_CODE,
        all_of(calls_own_function, left_by_itself),
        "it ended its own process ({status}) instead of returning a number",
    ),
    FaultRow(
        FailureKind.OOM_HOST,
        all_of(by_signal({signal.SIGKILL}), oom_rose),
        "killed for want of memory; lower runtime.parallel or execution.loader_workers",
    ),
    FaultRow(FailureKind.KILLED, by_signal({signal.SIGKILL}), "killed from outside (SIGKILL), nobody knows why"),
    FaultRow(
        FailureKind.SHM_FULL, all_of(by_signal({signal.SIGBUS}), shm_low), "a bus error while /dev/shm was nearly full"
    ),
    FaultRow(FailureKind.NATIVE_CRASH, by_signal(CRASH_SIGNALS), "native code crashed ({status}); see stacks.txt"),
    FaultRow(FailureKind.PREEMPTED, by_signal(_ASKED_TO_END), "ended from outside ({status})"),
    FaultRow(
        FailureKind.START, lambda case: not case.evidence.started, "ended before its first line ({status}); see its log"
    ),
    FaultRow(FailureKind.KILLED, lambda case: True, "ended without a last word ({status})"),
)


def _status(evidence: Evidence) -> str:
    if evidence.signal is not None:
        try:
            return signal.Signals(evidence.signal).name
        except ValueError:
            return f"signal {evidence.signal}"
    return f"exit status {evidence.exit_code}" if evidence.exit_code is not None else "nothing is known of its end"


def _first_line(text: str) -> str:
    """Return the first line with text, without control characters."""
    line = text.lstrip()[:_SAYING_MAX_CHARS].partition("\n")[0]
    return "".join(char if char.isprintable() else " " for char in line).strip()


def _last_message(case: FaultCase, row: FaultRow) -> str:
    """Return the child's exception, or the line of its log with a text of the row."""
    fault = case.fault
    if fault is None:
        at = max((case.log.rfind(text) for text in row.texts), default=-1)
        return _first_line(case.log[case.log.rfind("\n", 0, at) + 1 :]) if at >= 0 else "it left no message"
    first_line = _first_line(fault.message)
    if fault.code or not fault.type_names:
        return first_line or "it left no message"
    short = error_type(fault).removeprefix("builtins.")
    return f"{short}: {first_line}" if first_line else short


def error_type(fault: ChildFault) -> str:
    """Return the qualified class of an exception; empty if it has none."""
    return next((name for name in fault.type_names if not name.endswith("]")), next(iter(fault.type_names), ""))


def classify(evidence: Evidence, result: ChildResult | None, *, job: Job = Job.TRAIN) -> Failure:
    """Classify the end of an attempt.

    Args:
        evidence: The evidence of its end.
        result: The child's result, if any.
        job: The child's job.

    Returns:
        The one kind that fits best, with a sentence.
    """
    case = _case(evidence, result, job)
    row = next(row for row in ROWS if row.matches(case))
    return Failure(row.kind, render(row, evidence, result, job=job))


def render(row: FaultRow, evidence: Evidence, result: ChildResult | None, *, job: Job = Job.TRAIN) -> str:
    """Return a row's sentence with all placeholders filled, in one line."""
    case = _case(evidence, result, job)
    message = _last_message(case, row)
    xids = ", ".join(f"Xid {xid}: {FATAL_XIDS[xid]}" for xid in dict.fromkeys(fatal_xids(case)))
    return row.sentence.format(
        said=message,
        status=_status(evidence),
        beat=f"{evidence.beat_age_s:.0f} s",
        memory=memory_text(known_device_memory(evidence, case.fault)) or message,
        xids=xids or "it did not say why",
    )


def _case(evidence: Evidence, result: ChildResult | None, job: Job) -> FaultCase:
    fault = evidence.fault or (result.fault if result is not None else None)
    return FaultCase(evidence, result, fault, job)
