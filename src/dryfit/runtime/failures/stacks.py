"""Where the threads of a silent child are: asked of the child and of all it started, before they are killed.

Every child has told ``faulthandler`` to write its stacks on SIGUSR1; the workers it forks have inherited that. The
handler is native code that runs whatever Python waits for: a lock, a kernel, a system call.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

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
    """Have every process of a child's session write its stacks, one after another so that they do not mix.

    A process that is stopped cannot answer: its state stands in its heading. One that never asked for the signal is
    ended by it, a moment before it is killed anyway.

    Args:
        path: Where they write.
        leader_pid: The child.
        marker: The study's id, which all of them carry.

    Returns:
        The innermost frames of each thread, a line a thread.
    """
    begun = _size(path)
    deadline_s = time.monotonic() + _ALL_S
    # The child itself last, whatever time the others took: the last dump is where a failure is said to be.
    for pid in sorted(session_members(leader_pid, marker), key=lambda pid: (pid == leader_pid, pid)):
        if time.monotonic() > deadline_s and pid != leader_pid:
            continue
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"\n{_HEADING}{pid}, {_state(pid)}\n")
        before = _size(path)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
            _wait_for_more(path, before, time.monotonic() + _ANSWER_S)
    try:
        with path.open("rb") as file:
            file.seek(begun)
            text = file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return innermost_frames(text, leader_pid)


def innermost_frames(text: str, leader_pid: int = 0) -> str:
    """The innermost frames of each thread in what ``faulthandler`` wrote, a line a thread; at most a dozen lines.

    Args:
        text: What it wrote, with headings.
        leader_pid: The process whose threads come first.
    """
    lines = sorted(_lines(text), key=lambda line: not line.startswith(f"process {leader_pid},"))
    more = len(lines) - _MOST_LINES
    return "\n".join(lines[:_MOST_LINES] + ([f"and {more} more threads"] if more > 0 else []))


def _lines(text: str) -> Iterator[str]:
    who, frames, silent = "", list[str](), False
    for line in [*text.splitlines(), _HEADING]:
        found = _FILE.match(line)
        heading = line.startswith(_HEADING)
        if heading or _THREAD.match(line):
            if frames or (heading and silent):
                yield f"{who}: " + (" < ".join(frames) or "gave no stack")
            frames, silent = [], heading and line != _HEADING
            who = line.removeprefix("--- ") if heading else who
        elif found is not None and len(frames) < _FRAMES:
            frames.append(f"{found['function']} ({Path(found['file']).name}:{found['line']})")


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
    """Wait until a file has grown and grows no more."""
    last, since_s = before, time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        size = _size(path)
        if size != last:
            last, since_s = size, now_s
        elif size > before and now_s - since_s > _SETTLED_S:
            return
        time.sleep(_POLL_S)
