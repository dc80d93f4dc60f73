"""All exceptions of dryfit.

Every message has four parts: what was being done, what was found (with the value), what is allowed, and what to
do next. Every class has a stable ``code``, printed in brackets, and the exit status of its command.

    DryfitError
    ├── ConfigError            CONFIG      2   a study file, option or value is wrong
    ├── DataError              DATA        2   a row, label, split or file of the data set is wrong
    ├── FileError              FILE        2   a file is not what belongs in its place: a link, a FIFO, a folder
    ├── MachineError           MACHINE     2   this machine cannot do what was asked
    ├── LibraryError           LIBRARY     2   a private name of a library is missing, or does something else
    ├── LoadError              LOAD        2   a checkpoint's weights do not fit the model
    ├── CheckpointError        CHECKPOINT  2   a checkpoint is torn or belongs to another trial
    │   └── CorruptCheckpointError  CORRUPT 2  a checkpoint cannot be read although its files are as they were written
    ├── NonFiniteError         NONFINITE   2   the loss or a gradient became infinite or NaN
    ├── PoisonedError          POISONED    2   code in this process replaced functions that training relies on
    ├── StudyBusyError         BUSY        2   another process owns the study
    ├── LedgerError            LEDGER      2   the ledger cannot be read
    ├── TraceError             TRACE       2   a model's step cannot be traced: its memory is unknown
    ├── ShardError             SHARD       2   a model cannot be sharded over ranks as planned, or its ranks disagree
    ├── CommError              COMM        2   the processes that train a trial together lost each other
    ├── ObjectiveError         OBJECTIVE   2   a user's own function cannot be used, or gave no result
    ├── ChildError             CHILD       2   a preparing child process failed
    └── InternalError          INTERNAL    4   an invariant of ours broke
"""

from enum import IntEnum


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
