"""The frame of a child process: takes its request, does its job, and leaves a result or the fault that ended it.

``python -m dryfit.processes.child REQUEST_PATH MODULE:FUNCTION PARENT_PID`` is the fresh interpreter's way in.
"""

import errno
import faulthandler
import functools
import gc
import importlib
import importlib.metadata
import io
import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, cast

from dryfit.processes.channel import ChildChannel
from dryfit.processes.child_spec import hide_devices, launch_one_by_one, leave_secrets, secrets_from_input
from dryfit.processes.process import CopiesEndHere, die_with_parent, let_signals_through
from dryfit.settings.errors import ChildFault, DryfitError, InternalError, NonFiniteError, PoisonedError
from dryfit.settings.files import NO_ROOM, open_regular, read_model
from dryfit.settings.jobs import ChildRequest, ChildResult, answer_to
from dryfit.settings.secrets import redacted
from dryfit.settings.text import sendable
from dryfit.settings.wire import LOG_FILE, STACKS_FILE, ErrorParts, JobRequest, Phase, ProcessNeeds, Started

_CHAIN_MAX = 16
_MESSAGE_MAX_CHARS = 4_000
_TRACEBACK_MAX_CHARS = 16_000
_PROBE = "dryfit.meta.sanity:check_process"
_LIBRARIES = ("dryfit", "torch", "transformers", "accelerate", "datasets", "tokenizers")


class ChildStatus(IntEnum):
    """Exit status of a child."""

    RESULT = 0
    FAULT = 1
    DISK_FULL = 3
    """Not even the fault could be written."""
    NO_LAST_WORD = 70
    """The fault could not be written for another reason."""


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries a trial depends on, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, nearest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _CHAIN_MAX:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _type_names(error: BaseException) -> Iterator[str]:
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno is not None:
            yield f"{type(link).__module__}.{type(link).__qualname__}[{errno.errorcode.get(link.errno, link.errno)}]"
        for cls in type(link).__mro__[:-1]:
            yield f"{cls.__module__}.{cls.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  # its class may be of any library, and its own ``__str__`` may fail
        return f"(its message could not be made: {type(broken).__name__})"


def describe_fault(error: BaseException) -> ChildFault:
    """Describe an exception for the control process.

    An ``OSError`` with an error number adds a name such as ``builtins.OSError[ENOSPC]`` before its class names.
    """
    text = sendable("".join(traceback.format_exception(error)))
    notes = [str(note) for link in _chain(error) for note in getattr(link, "__notes__", ())]
    return ChildFault(
        type_names=tuple(dict.fromkeys(_type_names(error))),
        code=error.code if isinstance(error, DryfitError) else "",
        message=sendable(_message(error))[:_MESSAGE_MAX_CHARS],
        traceback=text[-_TRACEBACK_MAX_CHARS:],
        context=sendable("\n".join(dict.fromkeys(notes)))[:_MESSAGE_MAX_CHARS],
    )


def _fault_result(error: BaseException) -> ChildResult:
    parts = ErrorParts.of(error) if isinstance(error, DryfitError) else None
    return ChildResult(fault=describe_fault(error), error=parts)


def _own_session(folder: Path, parent_pid: int) -> None:
    """Leave the parent's session, tie our life to its, and send all output to the attempt's folder."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the control process's business
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # so is a batch system's warning, which may go to every process
    let_signals_through()
    null = os.open(os.devnull, os.O_RDONLY)
    log = open_regular(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    # Line by line, so that a kill loses no line of the log; the log's text is UTF-8 wherever we run.
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stacks = open_regular(folder / STACKS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)


def _heading(request: ChildRequest) -> str:
    versions = "  ".join(f"{name} {version}" for name, version in library_versions().items())
    job = request.body.job
    return f"dryfit {job.value} child, process {os.getpid()}\n{versions}\n{request.body.model_dump_json(indent=2)}\n"


def _load(entry: str) -> Any:
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _check_process(needs: ProcessNeeds, doing: str) -> None:
    """Refuse to go on if torch is no longer what was imported.

    Raises:
        PoisonedError: It was changed.
    """
    if "torch" in sys.modules and not needs.of_the_user:
        _load(_PROBE)(doing)


def _blamed(needs: ProcessNeeds, error: Exception) -> Exception:
    """Return what ended a job: a changed torch, if that is so, else the exception itself.

    In a process whose torch was changed, any exception may follow from that. Errors that our own checks raise over a
    setting, the data or a file do not depend on torch, and stay.
    """
    if isinstance(error, DryfitError) and not isinstance(error, NonFiniteError):
        return error
    try:
        _check_process(needs, f"looking for the cause of {type(error).__name__}")
    except PoisonedError as poisoned:
        poisoned.add_note(f"it came to light by {type(error).__name__}: {_message(error)}")
        poisoned.__cause__ = error
        return poisoned
    except Exception:  # noqa: BLE001  # a look at the process must not hide what ended it
        return error
    return error


def _do_job(body: JobRequest[Any], entry: str, channel: ChildChannel, secrets: Mapping[str, str]) -> ChildResult:
    needs = body.process_needs()
    leave_secrets(body, secrets)
    if needs.diagnostic:
        launch_one_by_one()
    if needs.hides_devices:
        hide_devices(needs.visible_device)
    function = _load(entry)
    gc.freeze()  # what was imported stays: the Trainer's full collections would go through all of it
    gc.enable()
    # Before the first line: a fork server that hands on a changed torch is recognised by it.
    _check_process(needs, f"starting the job {body.job}")
    channel.send(Started(pid=os.getpid(), overhead_ms=channel.since_placed_ms()))
    channel.send(Phase(name="load"))
    try:
        with CopiesEndHere():
            answer = answer_to(body, function(body, channel))
    except Exception as error:  # noqa: BLE001  # raised again, or as the cause of what is to blame
        raise _blamed(needs, error)  # noqa: B904  # the cause is set where there is one
    # It is not known since when torch was changed, so the result is not taken.
    _check_process(needs, f"ending the job {body.job}")
    return ChildResult(answer)


def _bare_result(error: BaseException) -> ChildResult:
    """Return a result for an exception whose text cannot be made or written."""
    cls = type(error)
    return ChildResult(fault=ChildFault((f"{cls.__module__}.{cls.__qualname__}",), "", "its message cannot be told"))


def _last_word(channel: ChildChannel | None, error: BaseException, secrets: Mapping[str, str]) -> ChildStatus:
    """Write why the job failed, as far as possible; a failure in here does not take its place."""
    with suppress(Exception):
        sys.stderr.write(redacted("".join(traceback.format_exception(error)), secrets))
    failed = error
    for say in (_fault_result, _bare_result):
        if channel is None:
            break
        try:
            channel.finish(say(error))
            return ChildStatus.FAULT
        except OSError as write_error:
            failed = write_error
            break
        except Exception as trouble:  # noqa: BLE001  # the exception's own code failed: less is said of it
            failed = trouble
    full = isinstance(failed, OSError) and failed.errno in NO_ROOM
    if full and channel is not None:
        channel.note_full_disk()
    return ChildStatus.DISK_FULL if full else ChildStatus.NO_LAST_WORD


def run_child(request_path: Path, entry: str, parent_pid: int, secrets: Mapping[str, str]) -> NoReturn:
    """Do the job of a request file, leave a result in its folder, and end the process.

    Args:
        request_path: The child's request; its folder is the attempt's folder.
        entry: ``module:function`` that does the job.
        parent_pid: The process whose end ends the child.
        secrets: Values by name: none may be in what it says, and its job gets those that it may have.
    """
    status = ChildStatus.NO_LAST_WORD
    channel: ChildChannel | None = None
    try:
        folder = request_path.parent
        _own_session(folder, parent_pid)
        request = read_model(request_path, ChildRequest)
        if request is None:
            raise InternalError("starting a child", f"no request at {request_path}")
        print(_heading(request))
        opened = channel = ChildChannel(
            folder, wakeup_fifo=request.wakeup_fifo, placed_at_s=request.placed_at_s, secrets=secrets
        )
        signal.signal(signal.SIGTERM, lambda _number, _frame: opened.note_sigterm())
        opened.finish(_do_job(request.body, entry, opened, secrets))
        status = ChildStatus.RESULT
    except BaseException as error:  # noqa: BLE001  # the outermost frame: the control process gets to know of any end
        status = _last_word(channel, error, secrets)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        # No interpreter teardown: it takes time, and threads of libraries can hang in it.
        os._exit(status)


if __name__ == "__main__":
    gc.disable()  # until all is imported
    run_child(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), secrets_from_input())
