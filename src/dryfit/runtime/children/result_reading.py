"""Reads what a child left in its folder: messages, result and logs, without the secrets of our environment.

It does so for a running child and for one that outlived its control process. What is read goes to the ledger and the
terminal.
"""

import os
from pathlib import Path

from pydantic import ValidationError

from dryfit.core.errors import FileError
from dryfit.core.jobs.child import ChildResult
from dryfit.core.regular_files import contents, reading
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
    Phase,
)

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
