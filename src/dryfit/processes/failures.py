"""Classification of an attempt's end as one kind of failure, its details, and what follows from it."""

import re
import signal
from dataclasses import dataclass
from pathlib import PurePosixPath

from dryfit.ledger.events import FaultDetail
from dryfit.processes import failure_texts as texts
from dryfit.processes.evidence import known_device_memory, memory_text
from dryfit.processes.failure_texts import (
    CRASH_SIGNALS,
    FATAL_XIDS,
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
from dryfit.settings.devices import device_in_words, devices_of
from dryfit.settings.errors import (
    PERMITTED,
    Action,
    AttemptTerms,
    ChildFault,
    Evidence,
    Failure,
    FailureKind,
    PastFailure,
    Permission,
    RecoveryAction,
)
from dryfit.settings.jobs import ChildResult
from dryfit.settings.training_messages import StopReason
from dryfit.settings.wire import Job

# Classifies the end of an attempt as exactly one kind of failure, by a table whose first matching row wins.


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
    FaultRow(FailureKind.NONFINITE, raised("dryfit.settings.errors.NonFiniteError"), "{said}"),
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
    case = FaultCase(evidence, result, job)
    row = next(row for row in ROWS if row.matches(case))
    return Failure(row.kind, render(row, case))


def render(row: FaultRow, case: FaultCase) -> str:
    """Return a row's sentence with all placeholders filled, in one line."""
    evidence, message = case.evidence, _last_message(case, row)
    xids = ", ".join(f"Xid {xid}: {FATAL_XIDS[xid]}" for xid in dict.fromkeys(fatal_xids(case)))
    return row.sentence.format(
        said=message,
        status=_status(evidence),
        beat=f"{evidence.beat_age_s:.0f} s",
        memory=memory_text(known_device_memory(evidence, case.fault)) or message,
        xids=xids or "it did not say why",
    )


# The details of a failure for its trial's story: the exception, the place in the code, and its context. Pure.


_FRAME = re.compile(r'^[ \t]*File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
"""A stack frame as ``traceback`` and ``faulthandler`` write it."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_ERROR_LINES_MAX = 12
_ERROR_CHARS_MAX = 2_000
_DETAIL_CHARS_MAX = 4_000
_FRAMES_MAX = 6
_LOG_LINES_MAX = 8
_WITH_LOG = frozenset({FailureKind.NATIVE_CRASH, FailureKind.START, FailureKind.KILLED, FailureKind.SHM_FULL})
"""Kinds whose details include the end of the log, if there is no exception."""

_OF_MEMORY = frozenset({FailureKind.OOM_DEVICE, FailureKind.OOM_NEIGHBOUR})


def fault_detail(kind: FailureKind, evidence: Evidence, fault: ChildFault | None, stacks: str = "") -> FaultDetail:
    """Return the details of a failure.

    Args:
        kind: The kind of failure.
        evidence: The evidence of the child's end.
        fault: The exception, if the child left one.
        stacks: What the child's fault handler wrote.
    """
    frames = _frames(fault.traceback) if fault is not None else _frames(_last_dump(stacks))[::-1]
    parts: list[str] = []
    if kind in _OF_MEMORY:
        parts.append(memory_text(known_device_memory(evidence, fault)))
    parts.append(fault.context if fault is not None else evidence.stacks)
    parts += [_frame_line(frame) for frame in frames[-_FRAMES_MAX:]]
    if fault is None and kind in _WITH_LOG:
        parts += [line for line in evidence.log_tail.splitlines() if line.strip()][-_LOG_LINES_MAX:]
    return FaultDetail(
        error_type=error_type(fault) if fault is not None else "",
        error=_first_lines(fault.message) if fault is not None else "",
        place=_place(frames),
        detail="\n".join(part for part in parts if part)[:_DETAIL_CHARS_MAX],
    )


def _frames(text: str) -> list[re.Match[str]]:
    """Return all frames of a text, in its order; in a traceback, those of the exception come last."""
    return list(_FRAME.finditer(text))


def _last_dump(stacks: str) -> str:
    """Return the current thread of the last dump of all threads; innermost frame first."""
    threads = list(_THREAD.finditer(stacks))
    if not threads:
        return ""
    current = [index for index, thread in enumerate(threads) if thread[0].startswith("Current")]
    at = current[-1] if current else len(threads) - 1
    end = threads[at + 1].start() if at + 1 < len(threads) else len(stacks)
    return stacks[threads[at].end() : end]


def _short(file: str) -> str:
    return "/".join(PurePosixPath(file).parts[-2:])


def _frame_line(frame: re.Match[str]) -> str:
    return f"at {frame['file']}:{frame['line']} in {frame['name'].strip()}"


def _place(frames: list[re.Match[str]]) -> str:
    """Return the innermost frame outside libraries, else the innermost of all."""
    own = [frame for frame in frames if not any(part in frame["file"] for part in _LIBRARIES)]
    frame = next(iter(own[-1:] or frames[-1:]), None)
    return "" if frame is None else f"{_short(frame['file'])}:{frame['line']} in {frame['name'].strip()}"


def _first_lines(message: str) -> str:
    return "\n".join(message[:_ERROR_CHARS_MAX].splitlines()[:_ERROR_LINES_MAX]).strip()


# Decide the recovery from a failure by the trial's earlier failures and :data:`dryfit.settings.errors.PERMITTED`.


_DELAY_FACTOR = 4.0
"""Factor of the delay for each further failure of the same kind."""

_DELAY_MAX_S = 300.0
_DELAY_STEPS_MAX = 8

_NOT_ITS_OWN = frozenset(
    {
        FailureKind.INTERRUPTED,
        FailureKind.PREEMPTED,
        FailureKind.LOST,
        FailureKind.DISK_FULL,
        FailureKind.INTERNAL,
    }
)
"""Kinds that say nothing about what the attempt was run for."""


ANOTHER_ATTEMPT = frozenset(
    {Action.RETRY, Action.FALLBACK, Action.EXCLUSIVE, Action.ELSEWHERE, Action.LIGHTER, Action.DIAGNOSE}
)
"""Actions after which the trial gets another attempt."""


def _since_progress(past: tuple[PastFailure, ...]) -> tuple[PastFailure, ...]:
    """Return the failures since the last attempt that reached a new checkpoint."""
    progress = [index for index, failure in enumerate(past) if failure.reached_checkpoint]
    return past[progress[-1] + 1 :] if progress else past


def decide_recovery(
    failure: Failure,
    past: tuple[PastFailure, ...],
    *,
    retries: int,
    reached_checkpoint: bool = False,
    fallbacks_left: int = 0,
    diagnosable: bool = False,
) -> RecoveryAction:
    """Decide the recovery from a failure.

    Two limits hold: the stages of the kind, over the failures since the trial last made progress; and ``retries``, over
    all failures of the trial that count. An attempt that reached a new checkpoint counts for neither. A diagnostic
    attempt is the trial's last, however it ends.

    Args:
        failure: The failure.
        past: Earlier failures of the same trial, oldest first.
        retries: Maximum number of retries of a trial.
        reached_checkpoint: Whether the failed attempt had reached a new checkpoint.
        fallbacks_left: Number of fallbacks of the trial's plan not tried yet.
        diagnosable: Whether the trial can be run in diagnostic mode, slowly, to learn where it fails.
    """
    permission = PERMITTED[failure.kind]
    if attempt_terms(past).diagnostic and failure.kind not in _NOT_ITS_OWN:
        return RecoveryAction(Action.GIVE_UP, failure.sentence)
    used = 0 if reached_checkpoint else sum(earlier.kind is failure.kind for earlier in _since_progress(past))
    action = _stage(permission, used)
    if (action is Action.FALLBACK and fallbacks_left == 0) or (action is Action.DIAGNOSE and not diagnosable):
        return RecoveryAction(permission.then, failure.sentence)
    if action is None:
        reason = f"{failure.sentence} (failure {used + 1} of this kind without a new checkpoint between)"
        return RecoveryAction(permission.then, reason)
    again = action in ANOTHER_ATTEMPT
    if again and permission.counts and not reached_checkpoint and sum(map(_counts, past)) >= retries:
        return RecoveryAction(permission.then, f"{failure.sentence} (the trial's {retries} retries are used up)")
    delay_s = min(_DELAY_MAX_S, permission.first_delay_s * _DELAY_FACTOR ** min(used, _DELAY_STEPS_MAX))
    return RecoveryAction(action, failure.sentence, delay_s if again else 0.0)


def _stage(permission: Permission, used: int) -> Action | None:
    """Return the action after ``used`` failures of the kind; None if all stages are used up."""
    for stage in permission.stages:
        if stage.times is None or used < stage.times:
            return stage.action
        used -= stage.times
    return None


def _counts(past: PastFailure) -> bool:
    return PERMITTED[past.kind].counts and not past.reached_checkpoint


def attempt_terms(past: tuple[PastFailure, ...]) -> AttemptTerms:
    """Return how the next attempt of a trial is to run after its failures so far.

    Terms hold until the trial ends: an attempt that fails for another reason is no proof that the first is gone.
    """
    actions = [failure.action for failure in past]
    return AttemptTerms(
        exclusive=Action.EXCLUSIVE in actions,
        diagnostic=Action.DIAGNOSE in actions,
        lighter=actions.count(Action.LIGHTER),
        avoid=frozenset(
            device
            for failure in past
            if failure.action is Action.ELSEWHERE and failure.device is not None
            for device in devices_of(failure.device)
        ),
    )


def terms_text(terms: AttemptTerms) -> tuple[str, ...]:
    """Return the terms in words, as the ledger keeps them; empty without any."""
    words: list[str] = []
    if terms.exclusive:
        words.append("alone on its device")
    if terms.diagnostic:
        words.append("slowly, to learn where it fails: blocking launches, device assertions")
    if terms.lighter:
        words.append(f"with fewer loader workers (step {terms.lighter}), tensors shared through files")
    if terms.avoid:
        words.append(f"rather not on device {', '.join(map(device_in_words, sorted(terms.avoid)))}")
    return tuple(words)
