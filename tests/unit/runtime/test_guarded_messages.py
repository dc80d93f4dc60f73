"""Every message can be made, whatever the exception says; and no clean-up hides what ended the work."""

import json
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from dryfit.ledger.events import EVENT, AttemptEnded, FailureFacts
from dryfit.ledger.ledger import Ledger
from dryfit.processes.attempt import read_messages, read_result
from dryfit.processes.channel import ChildChannel
from dryfit.processes.child import ChildStatus, _last_word
from dryfit.processes.child_spec import SupervisorSettings
from dryfit.processes.failure_texts import FaultCase
from dryfit.processes.failures import ROWS, classify, fault_detail, render
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.errors import Action, ChildFault, Evidence, FailureKind, FileError
from dryfit.settings.files import closing, first_error_wins
from dryfit.settings.jobs import ChildResult
from dryfit.settings.wire import Phase, Progress

ODD = {
    "braces": "{said} {status} {0} {} {{}} {beat!r:>{width}}",
    "percent": "%s %d %(name)s 100 %",
    "newlines": "\n\r\n\n  first\nsecond\n\n",
    "huge": "x" * 2**20,
    "huge lines": "line\n" * 2**18,
    "no text": "",
    "blank": " \n\t ",
    "control": "\x00\x1b[31m\x07",
    "bytes of a file name": os.fsdecode(b"caf\xe9 \xff"),
    "a code of ours": "row 7: label 9    [DATA]\n  allowed: 0 to 3\n  next: look",
    "right to left": "\u202eabc \U0001f4a5",
}
EMPTY = re.compile(r"\(\W*\)|:\s*$|\{\w*\}|\bNone\b")
"""What a placeholder leaves behind that had nothing to say."""


def ends_with(text: str) -> tuple[Evidence, ...]:
    """Ends of a child that said ``text``, in every place where it can say something."""
    return (
        Evidence(exit_code=1, fault=ChildFault(("a.Odd", "builtins.Exception"), "", text, text, text)),
        Evidence(exit_code=1, fault=ChildFault(("a.Odd",), "DATA", text, text)),
        Evidence(exit_code=1, fault=ChildFault((), "", text)),
        Evidence(signal=signal.SIGABRT, log_tail=text, xids=(79, 79, 4711)),
    )


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_every_row_s_sentence_can_be_made_of_whatever_is_said(text):
    for evidence in ends_with(text):
        classify(evidence, None)
        for row in ROWS:
            sentence = render(row, FaultCase(evidence, None))
            assert sentence.strip() and sentence.isprintable() and len(sentence) < 1_000


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.sentence[:20]}")
def test_no_sentence_has_an_empty_place(row):
    for evidence in (Evidence(), Evidence(signal=77), Evidence(exit_code=0), *ends_with(""), *ends_with(" \n\t")):
        assert not EMPTY.search(render(row, FaultCase(evidence, None)))


def test_braces_and_percent_signs_are_told_as_they_are():
    row = next(row for row in ROWS if row.kind is FailureKind.USER_CODE and "{said}" in row.sentence)
    for name in ("braces", "percent"):
        assert ODD[name] in render(row, FaultCase(ends_with(ODD[name])[0], None))


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_whatever_is_said_can_be_written_and_read_again(text):
    evidence = Evidence(exit_code=1, fault=ChildFault(("a.Odd",), "", sendable(text), sendable(text), sendable(text)))
    for row in ROWS:
        found = fault_detail(row.kind, evidence, evidence.fault, sendable(text))
        facts = FailureFacts(
            kind=row.kind,
            sentence=render(row, FaultCase(evidence, None)),
            action=Action.GIVE_UP,
            error_type=found.error_type,
            error=found.error,
            place=found.place,
            detail=found.detail,
        )
        event = AttemptEnded(number=1, attempt=1, failure=facts)
        assert EVENT.validate_json(event.model_dump_json()) == event


def sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# ---- the child's last word


class OddError(Exception):
    """Its own message fails."""

    def __str__(self) -> str:
        raise RuntimeError("no message for you")


def channel(folder: Path) -> ChildChannel:
    return ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0)


@pytest.mark.parametrize(
    "error", [OddError(), *(ValueError(text) for text in ODD.values())], ids=["its message fails", *ODD]
)
def test_a_child_always_has_a_last_word(tmp_path, error):
    assert _last_word(channel(tmp_path), error, {}) is ChildStatus.FAULT
    result = read_result(tmp_path)
    assert result.fault.type_names[0].endswith(type(error).__name__)


def test_less_is_said_of_an_exception_that_cannot_be_described(tmp_path, monkeypatch):
    def fails(error: BaseException) -> ChildResult:
        raise RecursionError

    monkeypatch.setattr("dryfit.processes.child._fault_result", fails)
    assert _last_word(channel(tmp_path), KeyError("a"), {}) is ChildStatus.FAULT
    result = read_result(tmp_path)
    assert result.fault.type_names == ("builtins.KeyError",)


@pytest.mark.parametrize(
    ("trouble", "status"),
    [
        (OSError(28, "No space left on device"), ChildStatus.DISK_FULL),
        (OSError(5, "Input/output error"), ChildStatus.NO_LAST_WORD),
        (RuntimeError("odd"), ChildStatus.NO_LAST_WORD),
    ],
)
def test_a_last_word_that_cannot_be_written_is_told_by_the_status(tmp_path, monkeypatch, trouble, status):
    opened = channel(tmp_path)

    def fails(result: ChildResult) -> None:
        raise trouble

    monkeypatch.setattr(opened, "finish", fails)
    assert _last_word(opened, ValueError("first"), {}) is status


def test_without_a_folder_there_is_only_the_status():
    assert _last_word(None, ValueError("x"), {}) is ChildStatus.NO_LAST_WORD
    assert _last_word(None, OSError(28, "full"), {}) is ChildStatus.DISK_FULL


# ---- clean-up


class FirstError(Exception):
    """What ended the work."""


def breaks(*_: object) -> None:
    raise OSError(5, "clean-up failed")


def test_a_clean_up_that_fails_is_added_to_the_first_error():
    with pytest.raises(FirstError) as caught, ExitStack() as stack:
        stack.push(closing(breaks))
        raise FirstError
    assert caught.value.__notes__ == ["cleaning up failed as well: OSError: [Errno 5] clean-up failed"]


def test_without_a_first_error_a_clean_up_that_fails_is_told():
    with pytest.raises(OSError, match="clean-up failed"), ExitStack() as stack:
        stack.push(closing(breaks))
    with pytest.raises(OSError, match="clean-up failed"), first_error_wins(None):
        breaks()


def test_a_clean_up_that_works_says_nothing():
    done: list[str] = []
    with pytest.raises(FirstError) as caught, ExitStack() as stack:
        stack.push(closing(lambda: done.append("closed")))
        raise FirstError
    assert done == ["closed"]
    assert not hasattr(caught.value, "__notes__")


def test_the_supervisor_s_end_does_not_hide_the_first_error(tmp_path, monkeypatch):
    settings = SupervisorSettings(
        marker="m", wakeup_fifo=None, isolation="fresh", server_log=tmp_path / "server.txt", preload=()
    )
    with pytest.raises(FirstError) as caught, Supervisor(settings) as supervisor:
        monkeypatch.setattr(supervisor, "close", breaks)
        raise FirstError
    assert "clean-up failed" in caught.value.__notes__[0]
    monkeypatch.undo()
    supervisor.close()


def test_the_ledger_s_end_does_not_hide_the_first_error(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", apply=lambda event: None)
    os.close(ledger._fd)  # somebody else closed it
    with pytest.raises(FirstError) as caught, ExitStack() as stack:
        stack.push(closing(ledger.close))
        raise FirstError
    assert "Bad file descriptor" in caught.value.__notes__[0]


def test_the_kinds_are_words():
    assert all(re.fullmatch(r"[a-z_]+", kind) and json.dumps(kind) for kind in FailureKind)


def test_a_sign_of_life_survives_the_loss_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes the folder of a running trial file by file: the trial itself is not to blame."""
    monkeypatch.setattr("dryfit.processes.channel._BEAT_EVERY_S", 0.0)
    channel = ChildChannel(tmp_path, wakeup_fifo=None, placed_at_s=0.0)
    (beat,) = tmp_path.iterdir()
    beat.unlink()
    channel.beat()
    assert beat.exists()
    before_ns = beat.stat().st_mtime_ns
    channel.beat()
    assert beat.stat().st_mtime_ns >= before_ns


def test_a_sign_of_life_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a file made where the link leads, nor is one there given another time."""
    monkeypatch.setattr("dryfit.processes.channel._BEAT_EVERY_S", 0.0)
    folder = tmp_path / "attempt"
    folder.mkdir()
    channel = ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0)
    (beat,) = folder.iterdir()
    elsewhere = tmp_path / "elsewhere"
    beat.unlink()
    beat.symlink_to(elsewhere)
    with pytest.raises(FileError, match="symbolic link"):
        channel.beat()
    assert not elsewhere.exists()
    elsewhere.touch()
    before_ns = elsewhere.stat().st_mtime_ns
    channel.note_full_disk()
    assert elsewhere.stat().st_mtime_ns == before_ns


def test_progress_is_sent_as_a_phase_begins_and_then_now_and_again(tmp_path: Path) -> None:
    channel = ChildChannel(tmp_path, wakeup_fifo=None, placed_at_s=0.0)
    asked: list[int] = []

    def told(step: int) -> Progress:
        asked.append(step)
        return Progress(step=step, total_steps=9, epoch=0.0)

    for step in (1, 2, 3):
        channel.progress(lambda step=step: told(step))
    channel.send(Phase(name="train", step=3))
    for step in (4, 5):
        channel.progress(lambda step=step: told(step))
    assert asked == [1, 4], "what is not sent is not asked for"
    sent = [message.step for message in read_messages(tmp_path) if isinstance(message, Progress)]
    assert sent == [1, 4]
