"""The ledger: nothing written is lost, nothing torn is read, one writer."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dryfit.ledger.events import (
    EVENT,
    Event,
    GenerationBegan,
    ReportMade,
    SessionClosed,
    StudyCreated,
    TrialAsked,
    TrialFinished,
)
from dryfit.ledger.ledger import Ledger, LedgerTail, StudyLock, lock_owner, read_ledger
from dryfit.ledger.replay import StudyState
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import FileError, InternalError, LedgerError, StudyBusyError
from dryfit.settings.trial import MetricPoint, Outcome

CREATED = StudyCreated(
    id="abc",
    name="s",
    task=BuiltInTask.CRITERIA,
    metric=Metric.F1_MACRO,
    direction=Direction.MAXIMIZE,
    seed=1,
    space="{}",
)


def write(path: Path, count: int) -> list[Event]:
    seen: list[Event] = []
    ledger = Ledger(path, apply=seen.append, clock=lambda: 5.0)
    ledger.append(CREATED)
    for index in range(count):
        ledger.append(SessionClosed(reason=f"r{index}"))
    ledger.close()
    return seen


def test_what_was_appended_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    seen = write(path, 3)
    assert read_ledger(path) == seen
    assert [event.seq for event in seen] == [0, 1, 2, 3]
    assert {event.at for event in seen} == {5.0}


def test_a_ledger_keeps_the_field_names_that_older_studies_have() -> None:
    began = GenerationBegan(generation=2, name="s-g2", comparability=CREATED.comparability, reused=(0, 1))
    asked = TrialAsked(
        number=0, params={}, internal={}, distributions={}, enqueued={"optim.lr": 0.1}, seed=1, fingerprint="f"
    )
    for event, names in ((began, {"basis", "told"}), (asked, {"given"})):
        line = event.model_dump_json()
        assert names <= json.loads(line).keys()
        assert EVENT.validate_json(line) == event


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_tail_is_dropped_and_overwritten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    seen = write(path, 2)
    os.truncate(path, path.stat().st_size - cut)
    assert read_ledger(path) == seen[:2]
    replayed: list[Event] = []
    ledger = Ledger(path, apply=replayed.append)
    ledger.append(SessionClosed(reason="after"))
    ledger.close()
    assert [event.seq for event in read_ledger(path)] == [0, 1, 2]
    assert replayed == read_ledger(path)


def test_numbers_that_are_no_numbers_survive(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    point = MetricPoint(0, 5, 0.5, float("nan"), {"loss": float("inf"), "f1": -0.0})
    ledger = Ledger(path, apply=lambda event: None)
    ledger.append(ReportMade(number=0, attempt=1, point=point))
    ledger.close()
    (event,) = read_ledger(path)
    assert isinstance(event, ReportMade)
    assert event.point.value != event.point.value
    assert event.point.metrics == {"loss": float("inf"), "f1": 0.0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"garbage\n", "no JSON object"),
        (b'{"v":2,"type":"session_closed"}\n', "newer dryfit"),
        (b'{"v":1,"seq":7,"at":1.0,"type":"session_closed","reason":"x"}\n', "event 7 stands where 1 belongs"),
        (b'{"v":1,"seq":1,"at":1.0,"type":"session_closed"}\n', "reason"),
    ],
)
def test_damage_inside_is_an_error_with_its_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, 0)
    with path.open("ab") as file:
        file.write(line)
    with pytest.raises(LedgerError, match=said) as caught:
        read_ledger(path)
    assert "line 2" in caught.value.doing


def test_a_line_without_an_end_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    before = write(path, 1)
    os.truncate(path, 1 << 40)  # as a power failure or a sparse copy leaves it
    for read in (lambda: read_ledger(path), lambda: Ledger(path, apply=before.append), LedgerTail(path).read):
        with pytest.raises(FileError, match="no end of a line"):
            read()
    assert path.stat().st_size == 1 << 40


def test_an_event_that_does_not_follow_those_before_it_is_no_part_of_the_ledger(tmp_path: Path) -> None:
    path, state = tmp_path / "ledger.jsonl", StudyState()
    ledger = Ledger(path, apply=state.apply)
    ledger.append(CREATED)
    before = path.read_bytes()
    with pytest.raises(InternalError, match="no trial 0 was asked for"):
        ledger.append(TrialFinished(number=0, outcome=Outcome.FAILED))
    assert path.read_bytes() == before
    ledger.append(TrialAsked(number=0, params={}, internal={}, distributions={}, seed=1, fingerprint="f"))
    ledger.close()
    assert [event.seq for event in read_ledger(path)] == [0, 1]


def test_a_failed_write_leaves_the_ledger_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, apply=lambda event: None)
    ledger.append(CREATED)
    before = path.read_bytes()
    real = os.write

    def half(fd: int, data: bytes) -> int:
        real(fd, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        ledger.append(SessionClosed(reason="x"))
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "write", real)
    assert ledger.append(SessionClosed(reason="y")).seq == 1
    ledger.close()


@pytest.mark.parametrize("other", [b"", b"{", b"x" * 5_000], ids=["emptied", "cut", "longer"])
def test_a_file_that_changes_while_a_line_is_written_keeps_what_another_program_wrote(
    other: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, apply=lambda event: None)
    ledger.append(CREATED)
    before = path.read_bytes()
    real = os.write

    def late(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", real)
        path.write_bytes(other)
        return real(fd, data)

    monkeypatch.setattr(os, "write", late)
    with pytest.raises(LedgerError, match="changed by another program"):
        ledger.append(SessionClosed(reason="y"))
    assert path.read_bytes() == other
    (kept,) = tmp_path.glob("ledger-recent-*.jsonl")
    assert kept.read_bytes().startswith(before) and b'"y"' in kept.read_bytes()[len(before) :]
    ledger.close()


def test_one_writer_at_a_time_and_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock_owner(path) is None
    code = (
        "import sys, time; from pathlib import Path; from dryfit.ledger.ledger import StudyLock\n"
        "with StudyLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        assert lock_owner(path) == holder.pid
        with pytest.raises(StudyBusyError, match=str(holder.pid)), StudyLock(path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert lock_owner(path) is None
    with StudyLock(path):
        assert lock_owner(path) == os.getpid()


def test_a_lock_that_cannot_be_written_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"), StudyLock(path):
            pass
    with StudyLock(path):
        assert lock_owner(path) == os.getpid()


def test_a_glance_at_who_owns_a_study_keeps_no_new_run_out(tmp_path: Path) -> None:
    """``dryfit status`` asks for the lock for a moment; a run that begins right then is not told of another."""
    path = tmp_path / "lock"
    path.touch()
    glance = os.open(path, os.O_RDWR)
    fcntl.flock(glance, fcntl.LOCK_SH)
    gone = threading.Timer(0.05, os.close, [glance])
    gone.start()
    with StudyLock(path):
        assert lock_owner(path) == os.getpid()
    gone.join()


def test_a_tail_reads_each_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    tail = LedgerTail(path)
    assert (tail.began_anew(), tail.read()) == (False, [])
    events = write(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert not tail.began_anew()
    assert tail.read() == events[:3]
    path.write_bytes(whole)
    assert (tail.began_anew(), tail.read(), tail.read()) == (False, events[3:], [])


def test_a_tail_notices_that_a_ledger_began_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, 3)
    tail = LedgerTail(path)
    assert not tail.began_anew()
    tail.read()
    path.rename(tmp_path / "old")
    assert tail.began_anew()
    write(path, 5)
    assert tail.began_anew()


def test_a_tail_says_which_line_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, 2)
    tail = LedgerTail(path)
    tail.read()
    with path.open("ab") as file:
        file.write(b'{"v": 2}\n')
    with pytest.raises(LedgerError, match="line 4: it has version 2"):
        tail.read()
