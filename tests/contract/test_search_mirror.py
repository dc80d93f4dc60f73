"""The real mirror process on a growing ledger: killed, torn, restarted; the storage ends up equal to the ledger."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from changing import mirror_into
from dryfit.search import follower_process as follower
from dryfit.search.followers import FollowerProcess, Mirror, followed_bytes, pause_after, trouble_of
from toy_ledger import Ledger

pytestmark = pytest.mark.heavy

FLUSH_S = 60.0


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def mirror_of(ledger: Ledger, storage: str) -> FollowerProcess:
    folder = ledger.path.parent
    return FollowerProcess(ledger.path, Mirror(storage), status=folder / "mirror.json", log=folder / "mirror.log")


def written(ledger: Ledger, storage: str) -> None:
    """Let a mirror write what the ledger has."""
    mirror = mirror_of(ledger, storage)
    mirror.start()
    assert mirror.flush(FLUSH_S)
    mirror.stop()


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"journal:{tmp_path / 'optuna.journal'}" if request.param == "journal" else f"sqlite:///{tmp_path / 'o.db'}"


def trials(storage: str, name: str = "toy") -> list[optuna.trial.FrozenTrial]:
    if storage.startswith("journal:"):
        opened: Any = JournalStorage(JournalFileBackend(storage.removeprefix("journal:")))
        return optuna.load_study(study_name=name, storage=opened).get_trials()
    opened = optuna.storages.RDBStorage(storage)
    try:
        return optuna.load_study(study_name=name, storage=opened).get_trials()
    finally:
        opened.remove_session()
        opened.engine.dispose()


def check_whole_study(found: list[optuna.trial.FrozenTrial]) -> None:
    ends = ["complete", "pruned", "failed", "refused", "cancelled", "complete", None]
    states = ["COMPLETE", "PRUNED", "FAIL", "PRUNED", "FAIL", "COMPLETE", "RUNNING"]
    assert [trial.number for trial in found] == list(range(7))
    assert [trial.state.name for trial in found] == states
    assert [trial.user_attrs.get("outcome") for trial in found] == ends
    assert [trial.value for trial in found] == [0.5, 0.2, None, None, None, 5.5, None]
    for trial in found:
        lr, batch = 0.001 * (trial.number + 1), (8, 16)[trial.number % 2]
        assert trial.params == {"optim.lr": pytest.approx(lr, rel=1e-12), "train.batch_size#0": batch}
        assert trial.user_attrs["params"] == {"optim.lr": lr, "train.batch_size": batch}
        assert trial.user_attrs["attempts"] == (2 if trial.number == 2 else 1)
        assert trial.user_attrs.get("failure") == ("killed: SIGKILL" if trial.number == 2 else None)
    reports = {trial.number: trial.intermediate_values for trial in found}
    assert reports.pop(3) == {}
    assert reports.pop(6) == {0: 0.75}
    assert reports.pop(4) == pytest.approx({0: 0.4, 1: float("nan")}, nan_ok=True)
    assert reports == {number: {0: 0.1 * number, 1: 0.2 * number} for number in (0, 1, 2, 5)}
    assert found[5].system_attrs == {"completed_rung_0": 0.5}


def test_a_running_study_can_be_loaded(ledger: Ledger, storage: str) -> None:
    mirror = mirror_of(ledger, storage)
    mirror.start()
    try:
        for _ in ledger.whole_study():
            assert mirror.flush(FLUSH_S)
        check_whole_study(trials(storage))
        study_file = storage.removeprefix("journal:")
        if storage.startswith("journal:"):
            opened = JournalStorage(JournalFileBackend(study_file))
            assert optuna.load_study(study_name="toy", storage=opened).best_trial.number == 5
    finally:
        mirror.stop()
    assert not mirror.alive


def test_an_event_of_a_newer_dryfit_is_passed_over(ledger: Ledger, tmp_path: Path) -> None:
    ledger.ask(0)
    ledger.add("moon_rose", number=0)
    ledger.finish(0, "complete", 1.0)
    journal = tmp_path / "j"
    mirror_into(ledger.path, journal)
    assert [trial.value for trial in trials(f"journal:{journal}")] == [1.0]


def test_several_goals(ledger: Ledger, storage: str) -> None:
    first = json.loads(ledger.path.read_text())
    also = [{"name": "loss", "direction": "minimize"}]
    ledger.path.write_text(json.dumps(first | {"also": also}) + "\n")
    for number, other in enumerate((0.25, float("nan"), 0.125)):
        ledger.ask(number)
        ledger.report(number, 0, 0.5)
        ledger.add("trial_finished", number=number, outcome="complete", value=0.5, also=[other])
    ledger.ask(3)
    ledger.report(3, 0, 0.5)
    ledger.report(3, 2, 0.25)  # numbers have gaps: a fold that stops early
    ledger.finish(3, "pruned")
    written(ledger, storage)
    found = trials(storage)
    assert [trial.state.name for trial in found] == ["COMPLETE", "FAIL", "COMPLETE", "PRUNED"]
    assert [trial.values for trial in found] == [[0.5, 0.25], None, [0.5, 0.125], None]
    assert found[3].intermediate_values == {0: 0.5, 2: 0.25}


def test_killed_between_any_two_writes(ledger: Ledger, tmp_path: Path) -> None:
    """Cut the journal after every whole line: each is a state a kill can leave."""
    whole = tmp_path / "whole.journal"
    slow = mirror_into(ledger.path, whole)
    ledger.after_add = slow.catch_up  # one event at a time: the longest journal there can be
    for _ in ledger.whole_study():
        pass
    check_whole_study(trials(f"journal:{whole}"))
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) > 40
    for count in range(len(lines)):
        cut = tmp_path / "cut.journal"
        cut.write_bytes(b"".join(lines[:count]))
        mirror_into(ledger.path, cut)
        check_whole_study(trials(f"journal:{cut}"))
        assert not cut.with_name("cut.journal.2").exists()


@pytest.mark.parametrize("damage", [b'{"op_code": 4, "stu', b"garbage\n", b'{"op_code": 4}\n'])
def test_a_damaged_journal_is_rebuilt_under_a_new_name(ledger: Ledger, tmp_path: Path, damage: bytes) -> None:
    journal = tmp_path / "optuna.journal"
    for _ in ledger.whole_study():
        pass
    for generation in ("", ".2"):
        written(ledger, f"journal:{journal}")
        file_now = journal.with_name(journal.name + generation)
        check_whole_study(trials(f"journal:{file_now}"))
        with file_now.open("ab") as file:
            file.write(damage)
    assert "torn or corrupt: writing optuna.journal.2" in (tmp_path / "mirror.log").read_text()


def until(happened: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + FLUSH_S
    while not happened():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_it_is_restarted_whenever_it_is_killed(ledger: Ledger, tmp_path: Path) -> None:
    mirror = mirror_of(ledger, f"journal:{tmp_path / 'j'}")
    mirror.start()
    for _ in range(3):
        assert mirror.pid is not None
        os.kill(mirror.pid, signal.SIGKILL)
        assert until(lambda: not mirror.alive)
        assert until(lambda: mirror.keep_alive() or mirror.alive)
    for _ in ledger.whole_study():
        pass
    assert mirror.flush(FLUSH_S)
    mirror.stop()
    mirror.keep_alive()
    assert not mirror.alive
    check_whole_study(trials(f"journal:{tmp_path / 'j'}"))


def test_pauses_grow_to_a_minute_and_no_further() -> None:
    assert [pause_after(failures) for failures in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_after(10_000) == 60


def test_a_storage_that_cannot_be_written_is_never_given_up() -> None:
    """Ten thousand failures at whatever moment, each with a new mirror; then all is written."""
    paused: list[float] = []
    told: list[Exception] = []
    made: list[int] = []
    done: list[int] = []

    class Flaky:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self.number)

        def catch_up(self) -> bool:
            if self.number < 10_000:
                raise OSError(f"no server at try {self.number}")
            done.append(self.number)
            return True

    with pytest.MonkeyPatch.context() as patch:
        clock = {"s": 0.0}
        patch.setattr(follower.time, "monotonic", lambda: clock["s"])
        patch.setattr(follower.time, "sleep", lambda s: clock.update(s=clock["s"] + 60.0) or paused.append(s))
        assert follower.follow(Flaky, ending=lambda: len(done) > 3, failed=told.append)  # type: ignore[arg-type]
    assert len(told) == 10_000 and len(paused) >= 10_000
    assert done[0] == 10_000


def test_a_storage_that_comes_back_has_everything(ledger: Ledger, tmp_path: Path) -> None:
    """The folder of the database appears only later: that is what a server is that is not there yet."""
    status = tmp_path / "mirror.json"
    storage = f"sqlite:///{tmp_path / 'later' / 'o.db'}"
    mirror = mirror_of(ledger, storage)
    mirror.start()
    try:
        study = ledger.whole_study()
        for _ in range(3):
            next(study)
        assert until(lambda: trouble_of(status))
        since_s, error = trouble_of(status) or (0.0, "")
        assert "unable to open database file" in error and "\n" not in error
        assert abs(since_s - time.time()) < FLUSH_S
        (tmp_path / "later").mkdir()
        for _ in study:
            pass
        assert until(lambda: followed_bytes(status) == ledger.path.stat().st_size)
        assert trouble_of(status) is None
        assert mirror.flush(FLUSH_S)
    finally:
        mirror.stop()
    check_whole_study(trials(storage))


def test_a_study_that_ends_does_not_wait_for_its_storage(ledger: Ledger, tmp_path: Path) -> None:
    mirror = mirror_of(ledger, "sqlite:////no/such/folder/o.db")
    mirror.start()
    assert not mirror.flush(FLUSH_S)
    assert not mirror.alive  # one more try, and it ended
    mirror.stop()
    assert "unable to open database file" in (tmp_path / "mirror.log").read_text()
    assert trouble_of(tmp_path / "mirror.json")


def test_a_last_try_finds_a_storage_that_came_back(ledger: Ledger, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'later' / 'o.db'}"
    mirror = mirror_of(ledger, storage)
    mirror.start()
    for _ in ledger.whole_study():
        pass
    assert until(lambda: trouble_of(tmp_path / "mirror.json"))
    (tmp_path / "later").mkdir()
    assert mirror.flush(FLUSH_S)
    mirror.stop()
    check_whole_study(trials(storage))


def test_changed_choices_get_a_name_of_their_own(ledger: Ledger, storage: str) -> None:
    ledger.ask(0)
    ledger.finish(0, "complete", 1.0)
    ledger.ask(1, choices=(32, 64))
    ledger.finish(1, "complete", 2.0)
    written(ledger, storage)
    assert [set(trial.params) for trial in trials(storage)] == [
        {"optim.lr", "train.batch_size#0"},
        {"optim.lr", "train.batch_size#0~2"},
    ]


def test_a_study_from_elsewhere_is_left_alone(ledger: Ledger, storage: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Ledger(tmp_path / "other" / "ledger.jsonl")
    other.path.write_text(other.path.read_text().replace("1700000000", "1600000000"))
    for one, numbers in ((ledger, 2), (other, 3)):
        for number in range(numbers):
            one.ask(number)
            one.finish(number, "complete", float(number))
        written(one, storage)
    assert [len(trials(storage, name)) for name in ("toy", "toy-2")] == [2, 3]


PARENT = """
import sys, time
from pathlib import Path
from dryfit.search.followers import FollowerProcess
from dryfit.search.followers import Mirror
folder = Path(sys.argv[1])
mirror = FollowerProcess(folder / "ledger.jsonl", Mirror(f"journal:{folder / 'j'}"),
    status=folder / "mirror.json", log=folder / "mirror.log")
mirror.start()
mirror.flush(60)
print(mirror.pid, flush=True)
time.sleep(600)
"""


def test_it_dies_with_its_parent(ledger: Ledger) -> None:
    command = [sys.executable, "-c", PARENT, str(ledger.path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    deadline_s = time.monotonic() + FLUSH_S
    while time.monotonic() < deadline_s and _runs(pid):
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_mirror_that_cannot_open_its_database_does_not_tell_the_password(tmp_path, monkeypatch):
    url = "nosuchdialect://me:planted-password@127.0.0.1:1/db"
    monkeypatch.setenv("MY_STORAGE", url)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.ask(0)
    mirror = FollowerProcess(
        ledger.path, Mirror("env:MY_STORAGE"), status=tmp_path / "status.json", log=tmp_path / "mirror.txt"
    )
    mirror.start()
    assert not mirror.flush(FLUSH_S)
    mirror.stop()
    log = (tmp_path / "mirror.txt").read_text()
    assert "nosuchdialect" in log and "Traceback" in log
    assert all(b"planted-password" not in path.read_bytes() for path in tmp_path.iterdir())
