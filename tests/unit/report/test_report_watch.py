"""A study watched through its files alone: what is read, when it is over, and that nothing is locked or written."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dryfit.documents.live_study import StudyFollower, WatchedMemory, watched_lines
from dryfit.ledger.events import AttemptEnded, AttemptPlaced, AttemptStarted, SessionClosed, SessionOpened
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import StudyLock
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.wire import BEAT_FILE, MESSAGES_FILE, Message, Phase, Progress
from ledgers import BEGAN_S, Script, begun


class Study:
    """A study's files, written as a control process and its children would."""

    def __init__(self, folder: Path) -> None:
        self.layout = StudyLayout(folder)
        self.script = Script()
        self.now_s = BEGAN_S
        self.follower = StudyFollower(self.layout, clock=lambda: self.now_s, host="box")

    def write(self) -> None:
        """Bring the ledger up to the script."""
        self.script.write(self.layout.folder)

    def say(self, number: int, *messages: Message, attempt: int = 1) -> None:
        folder = self.layout.trial(number).attempt(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / MESSAGES_FILE).open("a") as file:
            file.writelines(f"{message.model_dump_json()}\n" for message in messages)

    def place(self, number: int, *, device: str | None = None, needs_bytes: int | None = None) -> None:
        self.script.ask(number, {})
        self.script.say(AttemptPlaced(number=number, attempt=1, device=device, needs_bytes=needs_bytes))
        self.script.say(AttemptStarted(number=number, attempt=1, pid=os.getpid(), overhead_ms=1.0))


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = Study(tmp_path)
    study.script.begin()
    return study


def progress(step: int, device_bytes: int | None = None) -> Progress:
    return Progress(step=step, total_steps=100, epoch=0.1, loss=0.5, device_bytes=device_bytes)


def test_it_follows_the_ledger_and_the_messages(study: Study) -> None:
    study.place(0)
    study.write()
    study.say(0, Phase(name="train"), progress(10))
    first = study.follower.look()
    (trial,) = first.study.trials
    assert (trial.number, trial.phase, trial.step) == (0, "train", 10)
    study.say(0, progress(20))
    study.script.report(0, 0, 0.8)
    study.write()
    study.now_s += 10
    (trial,) = study.follower.look().study.trials
    assert (trial.step, trial.goals, trial.left_s) == (20, (0.8,), pytest.approx(80.0))
    study.script.fail(0, 1, FailureKind.KILLED, "killed", Action.RETRY)
    study.write()
    watched = study.follower.look()
    assert [trial.phase for trial in watched.study.trials] == ["waiting"]
    assert watched.memory == ()
    assert watched.summary is not None and watched.summary.troubles.failures[0].kind is FailureKind.KILLED


def test_who_begins_to_watch_late_takes_no_old_progress_for_speed(study: Study) -> None:
    study.place(0)
    study.write()
    study.say(0, Phase(name="train"), *(progress(step) for step in range(0, 60, 5)))
    (trial,) = study.follower.look().study.trials
    assert (trial.step, trial.left_s) == (55, None)
    study.now_s += 10
    study.say(0, progress(60), progress(65))
    (trial,) = study.follower.look().study.trials
    assert (trial.step, trial.left_s) == (65, pytest.approx(35.0))


def test_half_a_line_waits_for_its_end(study: Study) -> None:
    study.write()
    study.follower.look()
    study.script.ask(0, {})
    study.write()
    whole = study.layout.ledger.read_bytes()
    study.layout.ledger.write_bytes(whole[:-9])
    assert study.follower.look().study.trials == ()
    study.layout.ledger.write_bytes(whole)
    assert [trial.number for trial in study.follower.look().study.trials] == [0]


def test_a_ledger_that_begins_anew_is_read_anew(study: Study) -> None:
    study.write()
    assert study.follower.look().summary is not None
    other = begun(name="another")
    study.layout.ledger.unlink()
    assert study.follower.look().summary is None
    other.write(study.layout.folder)
    summary = study.follower.look().summary
    assert summary is not None and summary.study == "another"


def test_memory_of_a_device_is_that_of_the_trials_on_it(study: Study) -> None:
    gib = 2**30
    study.place(0, device="0", needs_bytes=3 * gib)
    study.place(1, device="0", needs_bytes=4 * gib)
    study.place(2, device="1")
    study.write()
    study.say(0, progress(1, 2 * gib))
    study.say(1, progress(1, 3 * gib))
    watched = study.follower.look()
    assert watched.memory == (
        WatchedMemory("here/0", (0, 1), 7 * gib, 5 * gib, None),
        WatchedMemory("here/1", (2,), None, None, None),
    )
    lines = watched_lines(watched)
    assert "device 0: trial(s) 0, 1: 7.0 GiB planned, 5.0 GiB observed" in lines
    assert "device 1: trial(s) 2: memory unknown" in lines


def test_before_trials_are_counted_their_plans_are(study: Study) -> None:
    params = {"train.batch_size": 8, "train.max_length": 64}
    study.script.ask(0, params)
    answer = study.script.plan(0, params)
    study.script.place(0)
    study.write()
    (host,) = study.follower.look().memory
    assert (host.device, host.planned_bytes) == (None, answer.memory.required_bytes)


# ---- whether somebody runs it


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def opened(study: Study, pid: int, host: str = "box") -> None:
    study.script.say(SessionOpened(pid=pid, host=host, version="0", total=3))
    study.write()


def test_a_study_runs_while_its_process_lives(study: Study, process: subprocess.Popen[bytes]) -> None:
    study.script.now_s = 4e9  # after the process was made
    opened(study, process.pid)
    assert study.follower.look().running
    process.kill()
    process.wait()
    watched = study.follower.look()
    assert not watched.running
    assert watched_lines(watched)[-1] == "nobody runs this study now"


def test_a_process_that_only_has_the_same_number_is_another(study: Study, process: subprocess.Popen[bytes]) -> None:
    opened(study, process.pid)  # a run of 2025
    assert not study.follower.look().running


def test_a_run_that_left_in_order_is_over(study: Study) -> None:
    study.script.now_s = 4e9
    opened(study, os.getpid())
    study.script.say(SessionClosed(reason="done"))
    study.write()
    assert not study.follower.look().running


def test_a_run_on_another_machine_is_believed_until_it_says_it_left(study: Study) -> None:
    opened(study, 2**22 + 1, host="elsewhere")
    assert study.follower.look().running
    study.place(0)
    study.write()
    (trial,) = study.follower.look().study.trials
    assert trial.memory_bytes is None  # its process id means somebody else here
    study.script.say(SessionClosed(reason="stopped"))
    study.write()
    assert not study.follower.look().running


def test_watching_locks_and_writes_nothing(study: Study) -> None:
    study.place(0)
    study.script.say(AttemptEnded(number=0, attempt=1), 1)
    study.write()
    (study.layout.trial(0).attempt(1)).mkdir(parents=True)
    (study.layout.trial(0).attempt(1) / BEAT_FILE).touch()
    before = {path: path.stat().st_mtime_ns for path in study.layout.folder.rglob("*")}
    study.follower.look()
    with StudyLock(study.layout.lock):  # nobody holds it, and nobody minds
        study.follower.look()
    study.layout.lock.unlink()
    after = {path: path.stat().st_mtime_ns for path in study.layout.folder.rglob("*") if path != study.layout.folder}
    assert after == {path: at for path, at in before.items() if path != study.layout.folder}


def test_the_host_is_this_one_unless_said(tmp_path: Path) -> None:
    assert StudyFollower(StudyLayout(tmp_path))._host == platform.node()
