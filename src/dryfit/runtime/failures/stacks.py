"""Dumps the thread stacks of a silent child and of the processes it started, before they are killed.

Every child registers ``faulthandler`` for SIGUSR1, and its forked workers inherit that. The handler is native code, so
it runs whatever Python waits for: a lock, a kernel, a system call.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from dryfit.core.errors import FileError
from dryfit.core.regular_files import appending, reading
from dryfit.runtime.children.processes import session_members

_ANSWER_S = 0.5
_SETTLED_S = 0.05
_ALL_S = 3.0
_POLL_S = 0.01
_MOST_LINES = 12
_FRAMES = 2
_READ_BYTES = 256 << 10

_FILE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_HEADING = "--- process "


def dump_stacks(path: Path, leader_pid: int, marker: str) -> str:
    """Have every process of a child's session write its stacks, one after another.

    A stopped process cannot answer; its state is in its heading. A process without the handler is ended by the signal,
    a moment before it would be killed anyway.

    Args:
        path: The file that they write to.
        leader_pid: The child.
        marker: The study's, which all of them carry.

    Returns:
        The innermost frames of each thread, a line a thread.
    """
    begun = _size(path)
    deadline_s = time.monotonic() + _ALL_S
    # The child comes last, whatever time the others took: the place of a failure is read from the last dump.
    for pid in sorted(session_members(leader_pid, marker), key=lambda pid: (pid == leader_pid, pid)):
        if time.monotonic() > deadline_s and pid != leader_pid:
            continue
        with suppress(OSError), appending(path) as file:
            file.write(f"\n{_HEADING}{pid}, {_state(pid)}\n".encode())
        before = _size(path)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
            _wait_for_more(path, before, time.monotonic() + _ANSWER_S)
    try:
        with reading(path) as file:
            file.seek(begun)
            text = file.read(_READ_BYTES).decode(errors="replace")
    except (OSError, FileError):
        return ""
    return innermost_frames(text, leader_pid)


def innermost_frames(text: str, leader_pid: int = 0) -> str:
    """Return the innermost frames of each thread in ``faulthandler``'s output, a line a thread, at most a dozen.

    Args:
        text: The output, with headings.
        leader_pid: The process whose threads come first.
    """
    lines = sorted(_lines(text), key=lambda line: not line.startswith(f"process {leader_pid},"))
    more = len(lines) - _MOST_LINES
    return "\n".join(lines[:_MOST_LINES] + ([f"and {more} more threads"] if more > 0 else []))


def _lines(text: str) -> Iterator[str]:
    process, frames, silent = "", list[str](), False
    for line in [*text.splitlines(), _HEADING]:
        frame = _FILE.match(line)
        heading = line.startswith(_HEADING)
        if heading or _THREAD.match(line):
            if frames or (heading and silent):
                yield f"{process}: " + (" < ".join(frames) or "gave no stack")
            frames, silent = [], heading and line != _HEADING
            process = line.removeprefix("--- ") if heading else process
        elif frame is not None and len(frames) < _FRAMES:
            frames.append(f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})")


def _state(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.name()}, {process.status()}"
    except psutil.Error:
        return "gone"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_for_more(path: Path, before: int, deadline_s: float) -> None:
    """Wait until a file has grown and does not grow any more."""
    last, since_s = before, time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        size = _size(path)
        if size != last:
            last, since_s = size, now_s
        elif size > before and now_s - since_s > _SETTLED_S:
            return
        time.sleep(_POLL_S)
