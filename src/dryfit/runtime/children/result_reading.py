"""Reading what a child left in its folder, whether we watched it or find it after a death of our own.

Nothing passes here with a secret of our environment in it: what is read goes on to the ledger and to the terminal.
"""

import os
from pathlib import Path

from pydantic import ValidationError

from dryfit.core.jobs import ChildResult
from dryfit.core.text.secrets import redacted, redacted_json, secrets_of
from dryfit.core.text.tail import LineTail
from dryfit.core.wire import (
    BEAT_FILE,
    LOG_FILE,
    MESSAGE,
    MESSAGES_FILE,
    RESULT_FILE,
    STACKS_FILE,
    STOP_FILE,
    VERDICT_FILE,
    Message,
    Note,
)

_LOG_TAIL_BYTES = 8_192
_OF_ONE_ATTEMPT = (MESSAGES_FILE, VERDICT_FILE, STOP_FILE, BEAT_FILE, RESULT_FILE)


def parse_messages(lines: list[bytes]) -> list[Message]:
    """Messages of some lines; a line that is none (a full disk can tear one) becomes a note that says so."""
    messages: list[Message] = []
    secrets = secrets_of(os.environ)
    for line in lines:
        try:
            messages.append(MESSAGE.validate_json(redacted_json(line, secrets)))
        except ValidationError:
            messages.append(Note(text=redacted(f"unreadable message: {line[:200]!r}", secrets)))
    return messages


def read_messages(folder: Path) -> list[Message]:
    """Everything the child of an attempt folder said; empty where it said nothing."""
    return parse_messages(list(LineTail(folder / MESSAGES_FILE).read()))


def read_result(folder: Path) -> ChildResult | None:
    """The last word in an attempt folder; None where there is none, or none that this version understands."""
    try:
        data = (folder / RESULT_FILE).read_bytes()
        return ChildResult.model_validate_json(redacted_json(data, secrets_of(os.environ)))
    except (FileNotFoundError, ValidationError):
        return None


def log_tail(log: Path) -> str:
    """The end of a log; its size does not matter."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            text = file.read(_LOG_TAIL_BYTES).decode(errors="replace")
        return redacted(text, secrets_of(os.environ))
    except FileNotFoundError:
        return ""


def child_log_tail(folder: Path) -> str:
    """The end of an attempt's log."""
    return log_tail(folder / LOG_FILE)


def stacks_tail(folder: Path) -> str:
    """The end of what an attempt's fault handler wrote down."""
    return log_tail(folder / STACKS_FILE)


def clear(folder: Path) -> None:
    """Make a folder ready for another child: what an earlier one said or was told there is removed, its log stays."""
    for name in _OF_ONE_ATTEMPT:
        (folder / name).unlink(missing_ok=True)
