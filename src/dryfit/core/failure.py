"""Kinds of failure, the evidence for them, and what may follow."""

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """Why an attempt ended without a result. Any evidence gets exactly one kind."""

    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    LOST = "lost"
    CONFIG = "config"
    DATA = "data"
    NETWORK = "network"
    DISK_FULL = "disk_full"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    POISONED = "poisoned"
    DEVICE_ASSERT = "device_assert"
    HANG = "hang"
    TIMEOUT = "timeout"
    NONFINITE = "nonfinite"
    START = "start"
    PLANNER = "planner"
    NATIVE_CRASH = "native_crash"
    KILLED = "killed"
    USER_CODE = "user_code"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ChildFault:
    """An exception as the child's outermost frame saw it.

    Attributes:
        type_names: Qualified class names along the method resolution order and the cause chain, nearest first.
        code: The ``code`` of a dryfit error, else empty.
        message: The exception's text, cut to a few kilobytes.
        traceback: Its traceback, cut likewise.
    """

    type_names: tuple[str, ...]
    code: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of an attempt that ended without a result.

    Attributes:
        exit_code: Exit status, None if ended by a signal or unknown.
        signal: Number of the signal that ended it, else None.
        fault: The exception it reported, if any.
        log_tail: Last lines of its log.
        started: Whether its first line was seen.
        beat_age_s: Age of its last heartbeat when it ended.
        stop_asked: We had asked it to stop.
        killed_by_us: Why we killed it: ``"start"``, ``"hang"``, ``"timeout"``, ``"now"`` or empty.
        server_lost: The fork server, or the control process before this one, died with it.
        oom_kills_rose: The cgroup's count of OOM kills rose during the attempt.
    """

    exit_code: int | None = None
    signal: int | None = None
    fault: ChildFault | None = None
    log_tail: str = ""
    started: bool = True
    beat_age_s: float = 0.0
    stop_asked: bool = False
    killed_by_us: str = ""
    server_lost: bool = False
    oom_kills_rose: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified end: its kind, and one sentence a person can act on."""

    kind: FailureKind
    sentence: str


class Action(StrEnum):
    """What follows a failure."""

    RETRY = "retry"
    """Run the trial again from its last good checkpoint, or from the start without one."""
    RUNG = "rung"
    """Run the trial again with the next of its plan's fallbacks, which needs less memory."""
    UNPLANNED = "unplanned"
    """The trial's memory stays unknown; ``execution.unknown`` says what becomes of it."""
    GIVE_UP = "give_up"
    """The trial ends FAILED."""
    PRUNE = "prune"
    """The trial ends PRUNED: a result, not a fault."""
    PAUSE = "pause"
    """The study stops, resumable; the trial stays open."""
    STOP_STUDY = "stop_study"
    """The study ends with an error; the trial stays open."""


@dataclass(frozen=True, slots=True)
class Permission:
    """What one kind permits.

    Attributes:
        action: What follows while the limit is not reached.
        limit: How many times the action may follow in one trial; None: always (a rung: while there is another).
        then: What follows after that.
        counts: Whether the attempt counts as a retry of the trial at all.
    """

    action: Action
    limit: int | None = None
    then: Action = Action.GIVE_UP
    counts: bool = True


PERMITTED: dict[FailureKind, Permission] = {
    FailureKind.INTERRUPTED: Permission(Action.PAUSE, counts=False),
    FailureKind.PREEMPTED: Permission(Action.RETRY, counts=False),
    FailureKind.LOST: Permission(Action.RETRY, counts=False),
    FailureKind.CONFIG: Permission(Action.GIVE_UP),
    FailureKind.DATA: Permission(Action.GIVE_UP),
    FailureKind.NETWORK: Permission(Action.RETRY, limit=3),
    FailureKind.DISK_FULL: Permission(Action.PAUSE, counts=False),
    FailureKind.OOM_DEVICE: Permission(Action.RUNG, counts=False),
    FailureKind.OOM_HOST: Permission(Action.RETRY, limit=1),
    FailureKind.POISONED: Permission(Action.RETRY, limit=3, counts=False),
    FailureKind.DEVICE_ASSERT: Permission(Action.GIVE_UP),
    FailureKind.HANG: Permission(Action.RETRY, limit=1),
    FailureKind.TIMEOUT: Permission(Action.GIVE_UP),
    FailureKind.NONFINITE: Permission(Action.PRUNE),
    FailureKind.START: Permission(Action.RETRY, limit=3),
    FailureKind.PLANNER: Permission(Action.RETRY, limit=1, then=Action.UNPLANNED, counts=False),
    FailureKind.NATIVE_CRASH: Permission(Action.RETRY, limit=1),
    FailureKind.KILLED: Permission(Action.RETRY, limit=3),
    FailureKind.USER_CODE: Permission(Action.GIVE_UP),
    FailureKind.INTERNAL: Permission(Action.STOP_STUDY),
}


@dataclass(frozen=True, slots=True)
class PastFailure:
    """An earlier failure of the same trial: its kind, and whether that attempt reached a new checkpoint."""

    kind: FailureKind
    reached_checkpoint: bool


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """What the loop must do, why, and how long to wait before."""

    action: Action
    reason: str
    delay_s: float = 0.0
