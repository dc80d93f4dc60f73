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
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    OOM_NEIGHBOUR = "oom_neighbour"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    SHM_FULL = "shm_full"
    POISONED = "poisoned"
    DEVICE_LOST = "device_lost"
    DEVICE_ASSERT = "device_assert"
    COMM = "comm"
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
        context: What was being worked on: the notes that were added to the exception on its way out. Ids of rows and
            ranges of numbers, never a row's text.
    """

    type_names: tuple[str, ...]
    code: str
    message: str
    traceback: str = ""
    context: str = ""


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
        phase: What it did last, in the words of :class:`dryfit.core.wire.Phase`; empty: nothing is known.
        step: The optimizer step it was at.
        device: The device it saw, or several, as ``CUDA_VISIBLE_DEVICES`` named them; None: none.
        device_free_bytes: Free memory of that device when it ended; of several, that of the one with the least room
            beside the neighbours.
        device_total_bytes: All of it.
        neighbour_bytes: What processes that are not ours took of it.
        planned_bytes: What the trial's plan says it reserves.
        peak_bytes: The most of the device that it was seen to reserve.
        xids: Error numbers that the driver reported of that device, or of any of several, during the attempt.
        xid_devices: The device of each of them, in their order.
        shm_free_bytes: Room left in ``/dev/shm``.
        disk_free_bytes: Room left where the study lies.
        diagnostic: The attempt was run to find out more (:attr:`AttemptTerms.diagnostic`).
        stacks: Where its threads were when it was killed for its silence, a line for each.

    None: not known, as on a machine without a GPU.
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
    phase: str = ""
    step: int = 0
    device: str | None = None
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None
    neighbour_bytes: int | None = None
    planned_bytes: int | None = None
    peak_bytes: int | None = None
    xids: tuple[int, ...] = ()
    xid_devices: tuple[str, ...] = ()
    shm_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    diagnostic: bool = False
    stacks: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified end: its kind, and one sentence a person can act on."""

    kind: FailureKind
    sentence: str


class Action(StrEnum):
    """What follows a failure."""

    RETRY = "retry"
    """Run the trial again from its last good checkpoint, or from the start without one."""
    FALLBACK = "rung"
    """Run the trial again with the next of its plan's fallbacks, which needs less memory."""
    EXCLUSIVE = "exclusive"
    """Run the trial again, with no other beside it on its device."""
    ELSEWHERE = "elsewhere"
    """Run the trial again on another device."""
    LIGHTER = "lighter"
    """Run the trial again with less of the host: fewer loader workers, tensors shared through files."""
    DIAGNOSE = "diagnose"
    """Run the trial once more, slowly, to learn where it fails."""
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
class Stage:
    """An action, and how many times it may follow one kind of failure.

    Attributes:
        action: What follows.
        times: Counted since the trial last made progress. None: always (a fallback: while there is another).
    """

    action: Action
    times: int | None = None


@dataclass(frozen=True, slots=True)
class Permission:
    """What one kind permits.

    Attributes:
        stages: What follows, one after the other.
        then: What follows after the last of them.
        counts: Whether the attempt counts as a retry of the trial at all.
        first_delay_s: How long the first attempt after it waits; each further one waits longer.
        blames_point: A trial that fails of this kind counts as refused for samplers: its parameters are to blame.
        trips: Whether a trial that fails of this kind counts for the breaker that ends a study.
    """

    stages: tuple[Stage, ...]
    then: Action = Action.GIVE_UP
    counts: bool = True
    first_delay_s: float = 0.0
    blames_point: bool = False
    trips: bool = True


def _always(action: Action, *, counts: bool = True, blames_point: bool = False) -> Permission:
    return Permission((Stage(action),), counts=counts, blames_point=blames_point)


def _times(action: Action, times: int, *, counts: bool = True, first_delay_s: float = 0.0) -> Permission:
    return Permission((Stage(action, times),), counts=counts, first_delay_s=first_delay_s)


PERMITTED: dict[FailureKind, Permission] = {
    FailureKind.INTERRUPTED: _always(Action.PAUSE, counts=False),
    FailureKind.PREEMPTED: _always(Action.RETRY, counts=False),
    FailureKind.LOST: _always(Action.RETRY, counts=False),
    FailureKind.CONFIG: _always(Action.GIVE_UP, blames_point=True),
    FailureKind.DATA: _always(Action.GIVE_UP, blames_point=True),
    FailureKind.NETWORK: _times(Action.RETRY, 3, first_delay_s=5.0),
    FailureKind.DISK_FULL: _always(Action.PAUSE, counts=False),
    FailureKind.CHECKPOINT_CORRUPT: _times(Action.RETRY, 3, counts=False),
    FailureKind.OOM_NEIGHBOUR: Permission(
        (Stage(Action.RETRY, 3), Stage(Action.EXCLUSIVE, 5)), counts=False, first_delay_s=15.0
    ),
    FailureKind.OOM_DEVICE: _always(Action.FALLBACK, counts=False, blames_point=True),
    FailureKind.OOM_HOST: _times(Action.LIGHTER, 1, first_delay_s=10.0),
    FailureKind.SHM_FULL: _times(Action.LIGHTER, 3),
    FailureKind.POISONED: _times(Action.RETRY, 3, counts=False),
    FailureKind.DEVICE_LOST: _times(Action.ELSEWHERE, 3, counts=False),
    FailureKind.DEVICE_ASSERT: Permission((Stage(Action.DIAGNOSE, 1),), counts=False, blames_point=True),
    FailureKind.COMM: Permission((Stage(Action.RETRY, 1), Stage(Action.ELSEWHERE, 1))),
    FailureKind.HANG: _times(Action.RETRY, 1),
    FailureKind.TIMEOUT: _always(Action.GIVE_UP),
    FailureKind.NONFINITE: _always(Action.PRUNE),
    FailureKind.START: _times(Action.RETRY, 3),
    FailureKind.PLANNER: Permission((Stage(Action.RETRY, 1),), then=Action.UNPLANNED, counts=False),
    FailureKind.NATIVE_CRASH: _times(Action.RETRY, 1),
    # Each of its retries must reach a new checkpoint, or it ends after three; how often it was killed before that says
    # nothing about it, and nothing about the study.
    FailureKind.KILLED: Permission((Stage(Action.RETRY, 3),), counts=False, trips=False),
    FailureKind.USER_CODE: _always(Action.GIVE_UP),
    FailureKind.INTERNAL: _always(Action.STOP_STUDY),
}


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """How the next attempt of a trial is run beside what its plan says; nothing of it changes what is learned.

    Attributes:
        exclusive: With no other trial on its device.
        diagnostic: With blocking launches and device assertions, to learn where it fails.
        lighter: How many times its share of the host is halved (loader workers); above 0, tensors are shared through
            files instead of shared memory.
        avoid: Devices it should not run on while there is another.
    """

    exclusive: bool = False
    diagnostic: bool = False
    lighter: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PastFailure:
    """An earlier failure of the same trial.

    Attributes:
        kind: What it was.
        reached_checkpoint: Whether that attempt reached a checkpoint further on than any before it.
        action: What followed.
        device: The device it was on.
    """

    kind: FailureKind
    reached_checkpoint: bool
    action: Action = Action.RETRY
    device: str | None = None


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """What the loop must do, why, and how long to wait before."""

    action: Action
    reason: str
    delay_s: float = 0.0
