"""What is kept of a failure for its trial's story: the exception, the place in the code, what was in hand. Pure."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from dryfit.core.failure import ChildFault, Evidence, FailureKind
from dryfit.runtime.failures.classify import error_type
from dryfit.runtime.failures.device_memory import known_device_memory, memory_text

_FRAME = re.compile(r'^[ \t]*File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
"""A frame, as ``traceback`` and ``faulthandler`` write it."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_ERROR_LINES_MAX = 12
_ERROR_CHARS_MAX = 2_000
_DETAIL_CHARS_MAX = 4_000
_FRAMES_MAX = 6
_LOG_LINES_MAX = 8
_FOR_LACK_OF_WORDS = frozenset({FailureKind.NATIVE_CRASH, FailureKind.START, FailureKind.KILLED, FailureKind.SHM_FULL})
"""Kinds of which, without an exception, the end of the log may tell more."""

_OF_MEMORY = frozenset({FailureKind.OOM_DEVICE, FailureKind.OOM_NEIGHBOUR})


@dataclass(frozen=True, slots=True)
class FaultDetail:
    """What :class:`dryfit.store.events.FailureFacts` keeps beside kind and sentence.

    Attributes:
        error_type: Qualified class of the exception; empty where there was none.
        error: Its first lines.
        place: Where in the code: ``train/step.py:88 in step``; empty where nothing is known.
        detail: Lines for the story.
    """

    error_type: str = ""
    error: str = ""
    place: str = ""
    detail: str = ""


def fault_detail(kind: FailureKind, evidence: Evidence, fault: ChildFault | None, stacks: str = "") -> FaultDetail:
    """Gather what a person, or a search over failures, wants to know of one.

    Args:
        kind: What it was called.
        evidence: What is known of the end.
        fault: The exception, if the child left one.
        stacks: What the child's fault handler wrote down.
    """
    frames = _frames(fault.traceback) if fault is not None else _frames(_last_dump(stacks))[::-1]
    parts: list[str] = []
    if kind in _OF_MEMORY:
        parts.append(memory_text(known_device_memory(evidence, fault)))
    if fault is not None:
        parts.append(fault.context)
    else:
        parts.append(evidence.stacks)
    parts += [_frame_line(frame) for frame in frames[-_FRAMES_MAX:]]
    if fault is None and kind in _FOR_LACK_OF_WORDS:
        parts += [line for line in evidence.log_tail.splitlines() if line.strip()][-_LOG_LINES_MAX:]
    return FaultDetail(
        error_type=error_type(fault) if fault is not None else "",
        error=_first_lines(fault.message) if fault is not None else "",
        place=_place(frames),
        detail="\n".join(part for part in parts if part)[:_DETAIL_CHARS_MAX],
    )


def _frames(text: str) -> list[re.Match[str]]:
    """All frames of a text, as they stand there: of a traceback, the exception's own are the last."""
    return list(_FRAME.finditer(text))


def _last_dump(stacks: str) -> str:
    """The thread that crashed, or was asked, in the last dump of all threads; innermost frame first."""
    threads = list(_THREAD.finditer(stacks))
    if not threads:
        return ""
    current = [index for index, one in enumerate(threads) if one[0].startswith("Current")]
    at = current[-1] if current else len(threads) - 1
    end = threads[at + 1].start() if at + 1 < len(threads) else len(stacks)
    return stacks[threads[at].end() : end]


def _short(file: str) -> str:
    return "/".join(PurePosixPath(file).parts[-2:])


def _frame_line(frame: re.Match[str]) -> str:
    return f"at {frame['file']}:{frame['line']} in {frame['name'].strip()}"


def _place(frames: list[re.Match[str]]) -> str:
    """The innermost frame that is no library's, else the innermost of all."""
    own = [frame for frame in frames if not any(part in frame["file"] for part in _LIBRARIES)]
    frame = next(iter(own[-1:] or frames[-1:]), None)
    return "" if frame is None else f"{_short(frame['file'])}:{frame['line']} in {frame['name'].strip()}"


def _first_lines(message: str) -> str:
    return "\n".join(message[:_ERROR_CHARS_MAX].splitlines()[:_ERROR_LINES_MAX]).strip()
