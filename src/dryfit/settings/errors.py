"""Errors of dryfit, and the kinds of failure that end a trial."""

from dataclasses import dataclass
from enum import IntEnum

from dryfit.settings.older_python import StrEnum

# All exceptions of dryfit.
#
# Every message has four parts: what was being done, what was found (with the value), what is allowed, and what to do
# next. Every class has a stable ``code``, printed in brackets, and the exit status of its command.
#
#     DryfitError
#     ├── ConfigError            CONFIG      2   a study file, option or value is wrong
#     ├── DataError              DATA        2   a row, label, split or file of the data set is wrong
#     ├── FileError              FILE        2   a file is not what belongs in its place: a link, a FIFO, a folder
#     ├── MachineError           MACHINE     2   this machine cannot do what was asked
#     ├── LibraryError           LIBRARY     2   a private name of a library is missing, or does something else
#     ├── LoadError              LOAD        2   a checkpoint's weights do not fit the model
#     ├── CheckpointError        CHECKPOINT  2   a checkpoint is torn or belongs to another trial
#     │   └── CorruptCheckpointError  CORRUPT 2  a checkpoint cannot be read although its files are as they were written
#     ├── NonFiniteError         NONFINITE   2   the loss or a gradient became infinite or NaN
#     ├── PoisonedError          POISONED    2   code in this process replaced functions that training relies on
#     ├── StudyBusyError         BUSY        2   another process owns the study
#     ├── LedgerError            LEDGER      2   the ledger cannot be read
#     ├── TraceError             TRACE       2   a model's step cannot be traced: its memory is unknown
#     ├── ShardError             SHARD       2   a model cannot be sharded over ranks as planned, or its ranks disagree
#     ├── CommError              COMM        2   the processes that train a trial together lost each other
#     ├── ObjectiveError         OBJECTIVE   2   a user's own function cannot be used, or gave no result
#     ├── ChildError             CHILD       2   a preparing child process failed
#     └── InternalError          INTERNAL    4   an invariant of ours broke


class ExitStatus(IntEnum):
    """Exit status of every ``dryfit`` command."""

    DONE = 0
    ANSWER_IS_NO = 1
    CANNOT_RUN = 2
    STOPPED = 3
    BUG = 4
    INTERRUPTED = 130


class DryfitError(Exception):
    """Base of all errors that dryfit raises on purpose.

    Args:
        doing: What was being done, e.g. ``"reading posts.jsonl, line 7"``.
        found: What was found, with the offending value.
        allowed: What would have been accepted; may be empty.
        hint: What to do next; may be empty.
    """

    code = "ERROR"
    exit_status = ExitStatus.CANNOT_RUN

    def __init__(self, doing: str, found: str, allowed: str = "", hint: str = "") -> None:
        super().__init__(doing, found, allowed, hint)
        self.doing = doing
        self.found = found
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"{self.doing}: {self.found}    [{self.code}]"]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.hint:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)


class ConfigError(DryfitError):
    """A study file, an option or a value is wrong."""

    code = "CONFIG"


class DataError(DryfitError):
    """A row, a label, a split or a file of the data set is wrong."""

    code = "DATA"


class FileError(DryfitError):
    """A file of the wrong kind or size: a link, a FIFO, a device or a folder, or a file over the limit."""

    code = "FILE"


class MachineError(DryfitError):
    """This machine does not support the request (platform, device, missing extra)."""

    code = "MACHINE"


class LibraryError(DryfitError):
    """An installed library is not one that dryfit was tested with: a private name is missing or has changed."""

    code = "LIBRARY"


class LoadError(DryfitError):
    """A checkpoint's weights do not fit the model."""

    code = "LOAD"


class CheckpointError(DryfitError):
    """A checkpoint is torn, or belongs to another trial."""

    code = "CHECKPOINT"


class CorruptCheckpointError(CheckpointError):
    """A checkpoint cannot be read, although its files are as they were written."""

    code = "CORRUPT"


class NonFiniteError(DryfitError):
    """The loss or a gradient became infinite or NaN; a result of the trial, not a fault."""

    code = "NONFINITE"


class PoisonedError(DryfitError):
    """Code in this process replaced functions that training relies on: its results cannot be trusted."""

    code = "POISONED"


class StudyBusyError(DryfitError):
    """Another live process owns the study."""

    code = "BUSY"


class LedgerError(DryfitError):
    """The ledger cannot be read, or was written by a newer dryfit."""

    code = "LEDGER"


class TraceError(DryfitError):
    """A model's training step cannot be traced without a device, so its memory is unknown."""

    code = "TRACE"


class ShardError(DryfitError):
    """A model cannot be sharded as planned, the sharded model differs from the whole one, or its ranks disagree."""

    code = "SHARD"


class CommError(DryfitError):
    """The processes that train one trial together lost each other."""

    code = "COMM"


class ObjectiveError(DryfitError):
    """A user's own function cannot be called by a trial's process, or broke its contract."""

    code = "OBJECTIVE"


class ChangedError(DryfitError):
    """Rows, a model or the user's own code are no longer what the study was started or resumed with."""

    code = "CHANGED"


class ChildError(DryfitError):
    """A child process that prepares trials failed for a reason that is not the user's data."""

    code = "CHILD"


class InternalError(DryfitError):
    """An invariant of ours broke; please report it."""

    code = "INTERNAL"
    exit_status = ExitStatus.BUG


def _tree(cls: type[DryfitError]) -> dict[str, type[DryfitError]]:
    classes: dict[str, type[DryfitError]] = {}
    for child in cls.__subclasses__():
        classes.update(_tree(child))
    return {**classes, cls.code: cls}  # last: a subclass without a code of its own is rebuilt as its parent


def error_class(code: str) -> type[DryfitError]:
    """Return the class with a code; :class:`InternalError` for an unknown one."""
    return _tree(DryfitError).get(code, InternalError)


# Kinds of failure, their evidence, and the actions that each kind permits.


class FailureKind(StrEnum):
    """Why an attempt ended without a result. All evidence is classified as exactly one kind."""

    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    LOST = "lost"
    CONFIG = "config"
    DATA = "data"
    NETWORK = "network"
    DISK_FULL = "disk_full"
    CHANGED = "changed"
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
    """An exception that ended a child process.

    Attributes:
        type_names: Qualified class names along the method resolution order and the cause chain, nearest first.
        code: The ``code`` of a dryfit error, else empty.
        message: The exception's text, truncated to a few kilobytes.
        traceback: Its traceback, truncated too.
        context: Notes added to the exception about what was being processed: ids of rows and ranges of numbers, never a
            row's text.
    """

    type_names: tuple[str, ...]
    code: str
    message: str
    traceback: str = ""
    context: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence about an attempt that ended without a result. None in a field: not known, as without a GPU.

    Attributes:
        exit_code: Exit status; None if ended by a signal, or unknown.
        disk_full: Whether it said that not even its fault could be written to the disk.
        signal: Number of the signal that ended it.
        fault: The exception it reported.
        log_tail: Last lines of its log.
        started: Whether its first message was received.
        beat_age_s: Age of its last heartbeat when it ended.
        stop_asked: Whether it had been asked to stop.
        killed_by_us: Why the control process killed it: ``"start"``, ``"hang"``, ``"timeout"``, ``"now"`` or empty.
        server_lost: Whether the fork server, or the earlier control process, died with it.
        oom_kills_rose: Whether the cgroup's count of OOM kills rose during the attempt.
        phase: Its last phase, as in :class:`dryfit.settings.wire.Phase`; empty: unknown.
        step: Its last optimizer step.
        device: Its device or devices, as in ``CUDA_VISIBLE_DEVICES`` on its node; None: none.
        device_free_bytes: Free memory of the device when it ended; of several, of the one with the least capacity left
            by other processes.
        device_total_bytes: All memory of that device.
        neighbour_bytes: Memory that processes outside the study used there.
        planned_bytes: Memory that the trial's plan reserves.
        peak_bytes: The most device memory that it was seen to reserve.
        xids: Error numbers that the driver reported for its devices during the attempt.
        xid_devices: The device of each of them, in order.
        shm_free_bytes: Free space in ``/dev/shm``.
        disk_free_bytes: Free space on the study's disk.
        diagnostic: Whether it was a diagnostic attempt (:attr:`AttemptTerms.diagnostic`).
        stacks: Stacks of its threads when it was killed as hanging, one line each.
    """

    exit_code: int | None = None
    disk_full: bool = False
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
    """A classified failure: its kind, and one sentence that a person can act on."""

    kind: FailureKind
    sentence: str


class Action(StrEnum):
    """The action that follows a failure."""

    RETRY = "retry"
    """Run the trial again from its last good checkpoint, or from the start without one."""
    FALLBACK = "rung"
    """Run the trial again with the next of its plan's fallbacks, which needs less memory."""
    EXCLUSIVE = "exclusive"
    """Run the trial again, with no other beside it on its device."""
    ELSEWHERE = "elsewhere"
    """Run the trial again on another device."""
    LIGHTER = "lighter"
    """Run the trial again with fewer loader workers, and tensors shared through files."""
    DIAGNOSE = "diagnose"
    """Run the trial again with slow diagnostics, to learn where it fails."""
    UNPLANNED = "unplanned"
    """Treat the trial's memory as unknown, as ``execution.unknown`` says."""
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
        action: The action.
        times: Counted since the trial last made progress. None: always (a fallback: while there is another).
    """

    action: Action
    times: int | None = None


@dataclass(frozen=True, slots=True)
class Permission:
    """The actions that one kind of failure permits.

    Attributes:
        stages: The actions, in order.
        then: The action after the last of them.
        counts: Whether the next attempt counts as a retry of the trial.
        first_delay_s: Wait before the first attempt after it; each further one waits longer.
        blames_point: A trial that fails of this kind counts as refused for samplers: its parameters are to blame.
        trips: Whether a trial that fails of this kind counts towards the limits that stop a study.
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
    FailureKind.CHANGED: _always(Action.PAUSE, counts=False),
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
    # The trial ends after three kills in a row without a new checkpoint between them. Being killed from outside says
    # nothing about the trial or the study.
    FailureKind.KILLED: Permission((Stage(Action.RETRY, 3),), counts=False, trips=False),
    FailureKind.USER_CODE: _always(Action.GIVE_UP),
    FailureKind.INTERNAL: _always(Action.STOP_STUDY),
}


@dataclass(frozen=True, slots=True)
class AttemptTerms:
    """How the next attempt of a trial runs, in addition to its plan; does not change what is learned.

    Attributes:
        exclusive: No other trial runs on its device.
        diagnostic: Blocking launches and device assertions are on, to learn where it fails.
        lighter: How many times its loader workers are halved; above 0, tensors are shared through files instead of
            shared memory.
        avoid: Devices not to run on if there is another.
    """

    exclusive: bool = False
    diagnostic: bool = False
    lighter: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PastFailure:
    """An earlier failure of the same trial.

    Attributes:
        kind: Its kind.
        reached_checkpoint: Whether that attempt reached a later checkpoint than all before it.
        action: The action that followed.
        device: The device it ran on.
    """

    kind: FailureKind
    reached_checkpoint: bool
    action: Action = Action.RETRY
    device: str | None = None


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """The action to take, its reason, and the wait before it."""

    action: Action
    reason: str
    delay_s: float = 0.0
