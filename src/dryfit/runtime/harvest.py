"""Reading what a child left in its folder, whether we watched it or find it after a death of our own."""

from pathlib import Path

from pydantic import ValidationError

from dryfit.core.jobs import ChildResult
from dryfit.core.tail import LineTail
from dryfit.core.wire import (
    BEAT_FILE,
    LOG_FILE,
    MESSAGE,
    MESSAGES_FILE,
    RESULT_FILE,
    STOP_FILE,
    VERDICT_FILE,
    Message,
    Note,
    read_model,
)

_LOG_TAIL_BYTES = 8_192
_OF_ONE_ATTEMPT = (MESSAGES_FILE, VERDICT_FILE, STOP_FILE, BEAT_FILE, RESULT_FILE)


def parse_messages(lines: list[bytes]) -> list[Message]:
    """Messages of some lines; a line that is none (a full disk can tear one) becomes a note that says so."""
    messages: list[Message] = []
    for line in lines:
        try:
            messages.append(MESSAGE.validate_json(line))
        except ValidationError:
            messages.append(Note(text=f"unreadable message: {line[:200]!r}"))
    return messages


def read_messages(folder: Path) -> list[Message]:
    """Everything the child of an attempt folder said; empty where it said nothing."""
    return parse_messages(list(LineTail(folder / MESSAGES_FILE).read()))


def harvest(folder: Path) -> ChildResult | None:
    """The last word in an attempt folder; None where there is none, or none that this version understands."""
    try:
        return read_model(folder / RESULT_FILE, ChildResult)
    except ValidationError:
        return None


def log_tail(log: Path) -> str:
    """The end of a log; its size does not matter."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            return file.read(_LOG_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


def child_log_tail(folder: Path) -> str:
    """The end of an attempt's log."""
    return log_tail(folder / LOG_FILE)


def clear(folder: Path) -> None:
    """Make a folder ready for another child: what an earlier one said or was told there is removed, its log stays."""
    for name in _OF_ONE_ATTEMPT:
        (folder / name).unlink(missing_ok=True)
