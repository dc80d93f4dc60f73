"""The state of one running child: messages, signs of life, limits, logs, and what it left."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from dryfit.processes.child import ChildStatus
from dryfit.processes.child_spec import ChildSpec, secrets_as_input
from dryfit.processes.helpers import kill_leftovers, python_command, start_helper
from dryfit.processes.node import oom_kills, rose
from dryfit.settings.errors import Evidence, FileError
from dryfit.settings.files import contents, open_regular, reading
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.secrets import redacted, redacted_json, secrets_of
from dryfit.settings.text import LineTail
from dryfit.settings.wire import (
    BEAT_FILE,
    DISK_FULL_BEAT_NS,
    LOG_FILE,
    MESSAGE,
    MESSAGES_FILE,
    RESULT_FILE,
    STACKS_FILE,
    STOP_FILE,
    VERDICT_FILE,
    Checkpointed,
    Message,
    Note,
    Phase,
    Progress,
    Started,
)

# Reads what a child left in its folder: messages, result and logs, without the secrets of our environment.
#
# It does so for a running child and for one that outlived its control process. What is read goes to the ledger and
# the terminal.


_LOG_TAIL_BYTES = 8_192
_PHASE = b'"type":"phase"'
_FILES_OF_ONE_START = (MESSAGES_FILE, VERDICT_FILE, STOP_FILE, BEAT_FILE, RESULT_FILE)


def parse_messages(lines: list[bytes]) -> list[Message]:
    """Parse messages; a torn line (of a full disk) becomes a note."""
    messages: list[Message] = []
    secrets = secrets_of(os.environ)
    for line in lines:
        try:
            messages.append(MESSAGE.validate_json(redacted_json(line, secrets)))
        except ValidationError:
            messages.append(Note(text=redacted(f"unreadable message: {line[:200]!r}", secrets)))
    return messages


def new_messages(tail: LineTail) -> list[Message]:
    """Return the messages since the last call; none where no file of messages stands there."""
    try:
        return parse_messages(list(tail.read()))
    except FileError:
        return []


def read_messages(folder: Path) -> list[Message]:
    """Return all messages in an attempt's folder."""
    return new_messages(LineTail(folder / MESSAGES_FILE))


def read_phases(folder: Path) -> list[Phase]:
    """Return the phases alone of an attempt: of its many messages no other is parsed."""
    try:
        lines = [line for line in LineTail(folder / MESSAGES_FILE).read() if _PHASE in line]
    except FileError:
        return []
    return [message for message in parse_messages(lines) if isinstance(message, Phase)]


def read_result(folder: Path) -> ChildResult | None:
    """Return the result in an attempt's folder; None if there is none that this version understands."""
    data = contents(folder / RESULT_FILE)
    if data is None:
        return None
    try:
        return ChildResult.from_json(redacted_json(data, secrets_of(os.environ)))
    except ValidationError:
        return None


def log_tail(log: Path) -> str:
    """Return the last 8 KiB of a log; empty if there is none."""
    try:
        with reading(log) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            text = file.read(_LOG_TAIL_BYTES).decode(errors="replace")
        return redacted(text, secrets_of(os.environ))
    except (FileNotFoundError, FileError):
        return ""


def child_log_tail(folder: Path) -> str:
    """Return the end of an attempt's log."""
    return log_tail(folder / LOG_FILE)


def stacks_tail(folder: Path) -> str:
    """Return the end of an attempt's fault handler output."""
    return log_tail(folder / STACKS_FILE)


def clear(folder: Path) -> None:
    """Empty a folder for another child: messages, answers and the result go, the log stays."""
    for name in _FILES_OF_ONE_START:
        (folder / name).unlink(missing_ok=True)


# The state of one running child: messages, heartbeats, limits, log and the evidence of its end.


class FreshChild:
    """A child process in a new interpreter.

    Args:
        request_path: Its request.
        entry: ``module:function`` that does the job.
        environment: Its whole environment.
        secrets: As for :func:`dryfit.processes.child.run_child`.

    Raises:
        OSError: The system cannot make another process.
    """

    def __init__(self, request_path: Path, entry: str, environment: dict[str, str], secrets: Mapping[str, str]) -> None:
        command = python_command("dryfit.processes.child", str(request_path), entry, str(os.getpid()))
        with secrets_as_input(secrets) as stdin:
            self._process = start_helper(
                command, environment=environment, log=request_path.parent / LOG_FILE, stdin=stdin
            )
        self.exit_fd: int | None = None
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel before 5.3, or a sandbox without it: it is polled
                self.exit_fd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal, once it has ended; kills what is left of its session first."""
        if sys.platform == "linux":
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        elif self._process.poll() is None:
            return None
        kill_leftovers(self.pid)
        return self._process.wait()

    def kill(self) -> None:
        """Kill it; until it is reaped, no other process can have its process id."""
        with suppress(ProcessLookupError):  # it was reaped
            os.kill(self.pid, signal.SIGKILL)  # ``Popen.kill`` would reap it, and :meth:`poll` would find nothing

    def release(self) -> None:
        """Close ``exit_fd``; call it once the process has ended and the descriptor is watched no more."""
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None


MOST_BYTES = 8 * 2**20
"""Size up to which a log is left alone."""

HEAD_BYTES = 2**20
TAIL_BYTES = 3 * 2**20
_BLOCK_BYTES = 2**20
_PUNCH_HOLE_AND_KEEP_SIZE = 0x02 | 0x01  # linux/falloc.h: FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE


@dataclass(slots=True)
class LogLimit:
    """Keeps the size of one log in bounds.

    The child writes its log itself, so a log outlives the control process and loses no line to a kill. While it is
    written, nothing may be moved in it: only the disk space of its middle is given back, which no writer notices.
    """

    path: Path
    _freed_until: int = HEAD_BYTES

    def trim(self) -> None:
        """Give back the disk space of the middle while the child runs (Linux, on file systems that can do that)."""
        size = self._size()
        if size - self._freed_until <= MOST_BYTES - HEAD_BYTES:
            return
        until = (size - TAIL_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        with suppress(OSError, FileError):
            _free(self.path, self._freed_until, until)
            self._freed_until = until

    def settle(self) -> None:
        """Cut the middle out once the child has ended, and say so in its place."""
        size = self._size()
        if size <= MOST_BYTES:
            return
        # In place, since a full disk may have no room for a copy; the old end goes last, so a kill here loses no line.
        with suppress(OSError, FileError), os.fdopen(open_regular(self.path, os.O_RDWR), "r+b") as file:
            file.seek(size - TAIL_BYTES)
            tail = file.read()
            file.seek(HEAD_BYTES)
            cut = size - HEAD_BYTES - len(tail)
            file.write(b"\n[dryfit: %d bytes of this log are left out here]\n" % cut + tail)
            file.truncate()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def _free(path: Path, begin: int, end: int) -> None:
    """Give back the disk space of a range of a file; its size stays, and the range reads as zeros.

    Raises:
        OSError: The platform or the file system cannot do that.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has fallocate")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = open_regular(path, os.O_WRONLY)
    try:
        mode = ctypes.c_int(_PUNCH_HOLE_AND_KEEP_SIZE)
        if libc.fallocate(ctypes.c_int(fd), mode, ctypes.c_int64(begin), ctypes.c_int64(end - begin)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(fd)


FACTOR = 20.0
"""A silence this many times longer than the longest so far in the same phase is a hang."""

LEAST_S = 120.0
"""No shorter silence is a hang: a disk may stall, a kernel may be compiled for a new shape."""

LEAST_GAPS = 10
"""Silences needed in a phase before a limit is learned: the first steps compile and warm up."""


def silence_limit_s(most_s: float, longest_s: float, gaps: int) -> float:
    """The longest silence that is no hang yet: ``max(LEAST_S, FACTOR * longest_s)``, and never more than ``most_s``.

    Args:
        most_s: ``runtime.hang_timeout_s``.
        longest_s: The longest silence so far that ended with a sign of life.
        gaps: Number of silences so far.
    """
    if gaps < LEAST_GAPS:
        return most_s
    return min(most_s, max(LEAST_S, FACTOR * longest_s))


@dataclass(slots=True)
class SilenceLimits:
    """The silences of one process so far, by phase."""

    _longest_s: dict[str, float] = field(default_factory=dict[str, float])
    _gaps: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, phase: str, gap_s: float) -> None:
        """Record a silence of ``gap_s`` that ended with a sign of life."""
        self._longest_s[phase] = max(gap_s, self._longest_s.get(phase, 0.0))
        self._gaps[phase] = self._gaps.get(phase, 0) + 1

    def limit_s(self, phase: str, most_s: float) -> float:
        """Return :func:`silence_limit_s` for a phase."""
        return silence_limit_s(most_s, self._longest_s.get(phase, 0.0), self._gaps.get(phase, 0))


@dataclass(slots=True)
class Attempt:
    """One child, from its placement to its end. Times are those of the supervisor's own clock.

    Attributes:
        token: Name of this start for the fork server; each start has its own.
        begun_s: When it was asked for, and later when its process was made.
        asks: Number of fork servers that were asked for it.
        pid: None until its process exists.
        fresh: Its process, if it has an interpreter of its own.
        started_s: When its first line was seen.
        alive_s: Time of its last sign of life.
        killed_by_us: As in :class:`dryfit.settings.errors.Evidence`.
        killed_s: When it was killed first.
        stacks: As in :class:`dryfit.settings.errors.Evidence`.
        phase: What it does, by its last message on it.
        step: The optimizer step of its last message.
        peak_bytes: The most device memory that it has reported.
    """

    spec: ChildSpec
    token: str
    begun_s: float
    oom_kills_before: int | None = field(default_factory=oom_kills)
    asks: int = 0
    pid: int | None = None
    fresh: FreshChild | None = None
    started_s: float | None = None
    alive_s: float = 0.0
    stop_asked_s: float | None = None
    killed_by_us: str = ""
    killed_s: float | None = None
    stacks: str = ""
    phase: str = ""
    step: int = 0
    peak_bytes: int | None = None
    _silence: SilenceLimits = field(default_factory=SilenceLimits)
    _beat_ns: int = 0
    _tail: LineTail = field(init=False)
    _log: LogLimit = field(init=False)

    def __post_init__(self) -> None:
        self._tail = LineTail(self.spec.folder / MESSAGES_FILE)
        self._log = LogLimit(self.spec.folder / LOG_FILE)

    def look(self, now_s: float) -> list[Message]:
        """Read what is new in its folder; notice its first line and its heartbeat; keep its log in bounds."""
        self._log.trim()
        messages = new_messages(self._tail)
        try:
            beat_ns = (self.spec.folder / BEAT_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            beat_ns = 0
        # A change counts, not the age: the wall clock that stamps files may jump.
        if messages or beat_ns != self._beat_ns:
            if self.started_s is not None:
                self._silence.note(self.phase, now_s - self.alive_s)
            self._beat_ns = beat_ns
            self.alive_s = now_s
        for message in messages:
            self._note(message, now_s)
        return messages

    def _note(self, message: Message, now_s: float) -> None:
        """Keep what may explain its end."""
        match message:
            case Started():
                self.started_s = now_s if self.started_s is None else self.started_s
            case Phase(name=name, step=step):
                self.phase, self.step = name, step
            case Progress(step=step, device_bytes=device_bytes):
                self.step = step
                if device_bytes is not None:
                    self.peak_bytes = max(self.peak_bytes or 0, device_bytes)
            case Checkpointed(step=step):
                self.step = step
            case _:
                pass

    @property
    def hang_s(self) -> float:
        """The longest silence that is allowed now, in seconds."""
        limits = self.spec.limits
        return self._silence.limit_s(self.phase, limits.hang_s) if limits.hang_learned else limits.hang_s

    def overdue(self, now_s: float) -> str:
        """Return why it must be killed now, in the words of ``killed_by_us``; empty if it need not."""
        limits = self.spec.limits
        if self.killed_by_us:
            return ""
        if self.stop_asked_s is not None and now_s - self.stop_asked_s > limits.stop_grace_s:
            return "now"
        if self.started_s is None:
            return "start" if now_s - self.begun_s > limits.start_s else ""
        if now_s - self.alive_s > self.hang_s:
            return "hang"
        if limits.total_s is not None and now_s - self.started_s > limits.total_s:
            return "timeout"
        return ""

    def evidence(
        self, now_s: float, result: ChildResult | None, *, status: int | None, server_lost: bool, trouble: str = ""
    ) -> Evidence:
        """Collect the evidence of its end, once its log has its last size.

        Args:
            status: Exit status, or minus the signal that ended it; None: unknown.
            trouble: Why its process could not be made; added to the log's end.
        """
        self._log.settle()
        log = child_log_tail(self.spec.folder)
        trained = training_of(result)
        reported_bytes = (self.peak_bytes, trained.peak_reserved_bytes if trained is not None else None)
        return Evidence(
            exit_code=status if status is not None and status >= 0 else None,
            disk_full=status == ChildStatus.DISK_FULL and self._beat_ns == DISK_FULL_BEAT_NS,
            signal=-status if status is not None and status < 0 else None,
            fault=result.fault if result is not None else None,
            log_tail=f"{log}\n{trouble}" if trouble else log,
            started=self.started_s is not None,
            beat_age_s=now_s - self.alive_s if self.started_s is not None else 0.0,
            stop_asked=self.stop_asked_s is not None,
            killed_by_us=self.killed_by_us,
            server_lost=server_lost,
            oom_kills_rose=rose(self.oom_kills_before, oom_kills()),
            phase=self.phase,
            step=self.step,
            stacks=self.stacks,
            peak_bytes=max((size_bytes for size_bytes in reported_bytes if size_bytes is not None), default=None),
        )
