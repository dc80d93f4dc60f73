"""The details of a failure for its trial's story: the exception, the place in the code, and its context. Pure."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from dryfit.core.failure import ChildFault, Evidence, FailureKind
from dryfit.runtime.failures.classify import error_type
from dryfit.runtime.failures.device_memory import known_device_memory, memory_text

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


@dataclass(frozen=True, slots=True)
class FaultDetail:
    """What :class:`dryfit.store.events.FailureFacts` holds besides kind and sentence.

    Attributes:
        error_type: Qualified class of the exception; empty if there was none.
        error: The first lines of its message.
        place: The place in the code, like ``train/optim/step.py:88 in backward_batch``; empty if unknown.
        detail: Further lines for the story.
    """

    error_type: str = ""
    error: str = ""
    place: str = ""
    detail: str = ""


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
