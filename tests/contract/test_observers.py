"""Observers cannot hurt a study: whatever they do, its values, its verdicts and its end are as without them."""

import contextlib
import json
import re
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dryfit
import objectives
from dryfit.documents.live_progress import LiveDisplay
from dryfit.ledger.events import ReportMade, SessionClosed, VerdictGiven
from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import ConfigError, ExitStatus
from observers import Changes, Exits, Hangs, Raises, Recorder, facts, full_disk
from study_runs import ends, events_of, fold, objective_study, run, run_here

SEARCH = {"sampler": "tpe", "startup_trials": 2, "pruner": "median", "pruner_startup_trials": 1, "mirror": "none"}
TRIALS = 6


def tune(folder: Path, observers: Sequence[Any] = (), trials: int = TRIALS) -> dryfit.TuneResult:
    """A study whose trials report six times, some of which the pruner stops."""
    return dryfit.tune(
        objective=objectives.stepwise,
        space=objectives.SPACE,
        trials=trials,
        folder=folder,
        study={"seed": 4},
        search=SEARCH,
        observers=observers,
    )


def course(folder: Path) -> list[str]:
    """Everything that happened, without ids, times and processes."""
    named = ("id", "at", "pid", "overhead_ms", "first_step_ms", "needs_bytes", "observed", "folder", "result")
    return [event.model_dump_json(exclude=set(named)) for event in events_of(folder)]


def log_of(folder: Path) -> str:
    return (folder / "logs" / "observers.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study without observers."""
    folder = tmp_path_factory.mktemp("alone") / "study"
    assert tune(folder).status is ExitStatus.DONE
    verdicts = [event.proceed for event in events_of(folder) if isinstance(event, VerdictGiven)]
    assert {True, False} == set(verdicts), "a pruner that never stops a trial would show nothing"
    assert not (folder / "logs" / "observers.txt").exists()
    return folder


def test_a_study_does_not_notice_what_its_observers_do(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dryfit.study.observers.FINISH_S", 2.0)
    folder, good = tmp_path / "study", Recorder()
    hanging = [Hangs("on_open"), Hangs("on_event"), Hangs("on_note")]
    raising = [
        Raises(),
        Raises(RuntimeError("in the beginning"), "on_open"),
        Raises(full_disk()),
        Raises(full_disk(), "on_note"),
        Raises(KeyboardInterrupt(), "on_event"),
        Raises(GeneratorExit(), "on_event"),
    ]
    done = tune(folder, [*hanging, *raising, Exits(), Changes(), good])
    assert [(hang.inside, hang.left) for hang in hanging] == [(True, False)] * 3, "the study did not wait for them"
    assert [one.calls for one in raising] == [1] * len(raising), "none is called again"
    assert (done.status, ends(folder)) == (ExitStatus.DONE, ends(alone))
    for here, there in zip(course(folder), course(alone), strict=True):
        assert here == there

    log, errors = log_of(folder), capfd.readouterr().err
    for why, count in {
        "Hangs had not finished 2 s after the end of the session": 3,
        "Raises raised ConnectionError: the tracker is down": 1,
        "Raises raised RuntimeError: in the beginning": 1,
        "Raises raised OSError: [Errno 28] No space left on device": 2,
        "Raises raised KeyboardInterrupt": 1,
        "Raises raised GeneratorExit": 1,
        "Exits raised SystemExit: 7": 1,
    }.items():
        assert (log.count(f"the observer observers.{why}"), errors.count(f"the observer observers.{why}")) == (
            count,
            count,
        )
    assert errors.count("it is detached; the study goes on") == 10 == errors.count(str(folder / "logs/observers.txt"))
    assert log.count("    raise self.error\n") == 6 and log.count("threading.Event().wait(HANG_S)\n") == 3, "tracebacks"

    # Who behaves hears everything, in order, by one thread that is not the study's, and each state as it was then.
    assert good.told[:2] == ["open", "session_opened"] and good.told[-1] == "session_closed"
    assert {"note", "message"} <= set(good.told)
    assert len(good.threads) == 1 and threading.get_ident() not in good.threads
    state, states = StudyState(), {}
    for event in events_of(folder):
        state.apply(event)
        states[event.seq] = facts(state)
    assert good.events == events_of(folder)[1:]
    assert good.seen == [states[event.seq] for event in good.events]


def test_verdicts_come_while_an_observer_hangs(tmp_path: Path) -> None:
    """Every report has its verdict right behind it, and the study is done, inside the observer's very first call."""

    class Waits(dryfit.Observer):
        def on_event(self, event: object, state: object) -> None:
            released.wait()
            after.append(event)

    released, after = threading.Event(), []
    folder, waits = tmp_path / "study", Waits()
    runs = threading.Thread(target=lambda: results.append(tune(folder, [waits])))
    results: list[dryfit.TuneResult] = []
    runs.start()
    closed = (folder / "ledger.jsonl").exists
    while not closed() or not isinstance(events_of(folder)[-1], SessionClosed):
        assert runs.is_alive()
        threading.Event().wait(0.05)
    assert not after
    events = events_of(folder)
    reports = [index for index, event in enumerate(events) if isinstance(event, ReportMade)]
    assert len(reports) > TRIALS
    assert all(isinstance(events[index + 1], VerdictGiven) for index in reports)
    released.set()
    runs.join()
    assert [event.seq for event in after] == [event.seq for event in events[1:]], "late, and whole"
    assert results[0].status is ExitStatus.DONE and not (folder / "logs" / "observers.txt").exists()


def test_an_observer_that_falls_behind_is_detached(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dryfit.study.observers.MOST_WAITING", 20)
    folder, slow, good = tmp_path / "study", Hangs("on_event"), Recorder()
    assert tune(folder, [slow]).status is ExitStatus.DONE
    assert (slow.inside, slow.left, ends(folder)) == (True, False, ends(alone))
    assert log_of(folder).count("observers.Hangs is 20 calls behind; it is detached") == 1
    assert "threading.Event().wait(HANG_S)" in log_of(folder), "where it hangs"
    assert capfd.readouterr().err.count("detached") == 1
    assert tune(folder, [good], trials=TRIALS + 1).status is ExitStatus.DONE


def test_a_later_session_begins_with_the_whole_study(tmp_path: Path) -> None:
    folder, raises, good = tmp_path / "study", Raises(), Recorder()
    assert tune(folder, [raises, good], trials=3).status is ExitStatus.DONE
    before = len(good.events)
    assert dryfit.resume(folder, trials=5, observers=[raises, good]).status is ExitStatus.DONE
    assert raises.calls == 2, "another session attaches it again"
    assert log_of(folder).count("ConnectionError: the tracker is down; it is detached") == 2
    state, states = StudyState(), {}
    for event in events_of(folder):
        state.apply(event)
        states[event.seq] = facts(state)
    later = good.events[before:]
    assert good.told.count("open") == 2 and len(later) > 2
    assert good.seen[before:] == [states[event.seq] for event in later]
    assert len(fold(folder).trials) == 5


def test_detached_is_detached_for_all_of_several_studies(tmp_path: Path) -> None:
    files = []
    for name in "ab":
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(objective_study("quadratic", space='n = [1]\nkind = ["plain"]'), encoding="utf-8")
    raises, good = Raises(), Recorder()
    result = dryfit.tune_all(files, trials=2, observers=[raises, good])
    assert [study.status for study in result.studies] == [ExitStatus.DONE] * 2
    assert raises.calls == 1 and good.told.count("open") == good.told.count("session_closed") == 2
    assert (tmp_path / "a/logs/observers.txt").exists() and not (tmp_path / "b/logs/observers.txt").exists()


def test_an_observer_without_its_methods_is_refused_before_anything_runs(tmp_path: Path) -> None:
    class Half:
        def on_open(self, layout: object) -> None: ...

        def on_note(self, text: str) -> None: ...

    with pytest.raises(ConfigError, match="Half has no method on_event, on_message") as caught:
        tune(tmp_path / "study", [Half()])
    assert "a subclass of dryfit.Observer" in caught.value.hint
    assert not (tmp_path / "study").exists()


def test_the_commands_own_display_may_fail_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of the study is no longer shown, and nothing else changes."""

    def broken(*_: object) -> None:
        raise full_disk()

    file = tmp_path / "study.toml"
    file.write_text(objective_study("quadratic", space='n = [1]\nkind = ["plain"]'), encoding="utf-8")
    heard = run_here("tune", file, "--dir", tmp_path / "heard")
    monkeypatch.setattr(LiveDisplay, "on_event", broken)
    done = run_here("tune", file)
    assert done.returncode == heard.returncode == ExitStatus.DONE
    assert len(ends(tmp_path)) == 3 and ends(tmp_path) == ends(tmp_path / "heard")
    assert "trial 2: complete" in heard.stderr and "trial 2: complete" not in done.stderr
    assert done.stderr.count("dryfit.documents.live_progress.LiveDisplay raised OSError: [Errno 28]") == 1
    assert done.stdout.splitlines()[0] == heard.stdout.splitlines()[0]
    assert "raised OSError" in log_of(tmp_path)


# ---- observers that the study file names

LISTENERS = """
import sqlite3
import time

import dryfit

DATABASE = __file__.replace(".py", ".db")


class Rows(dryfit.Observer):
    def __init__(self) -> None:
        self.database = sqlite3.connect(DATABASE)  # for one thread alone, as sqlite demands
        self.database.execute("create table if not exists heard (seq integer, type text, trials integer)")

    def on_event(self, event: dryfit.events.Event, state: dryfit.events.StudyState) -> None:
        row = (event.seq, event.type, len(state.trials))
        with self.database:
            self.database.execute("insert into heard values (?, ?, ?)", row)


class Hangs(dryfit.Observer):
    def on_event(self, event, state) -> None:
        time.sleep(60)


def raises() -> dryfit.Observer:
    raise ConnectionError("no tracker here")


def hangs() -> dryfit.Observer:
    time.sleep(60)
    return Rows()
"""


def write_listeners(folder: Path, name: str, *listeners: str) -> Path:
    """A study with listeners in the file ``NAME.py`` beside it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(LISTENERS, encoding="utf-8")
    named = ", ".join(f'"{name}{listener}"' for listener in listeners)
    text = objective_study(
        "quadratic", study=f"trials = 3\nseed = 5\nlisteners = [{named}]", space='n = [1]\nkind = ["plain"]'
    )
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder


def heard(database: Path) -> list[tuple[int, str, int]]:
    with contextlib.closing(sqlite3.connect(database)) as opened:
        return opened.execute("select seq, type, trials from heard").fetchall()


def told(folder: Path) -> list[tuple[int, str, int]]:
    """What an observer is told of each event: its number, its type and the number of trials just after it."""
    state, rows = StudyState(), []
    for event in events_of(folder):
        state.apply(event)
        rows.append((event.seq, event.type, len(state.trials)))
    return rows[1:]


def test_listeners_hear_every_session_of_a_study_and_cannot_hurt_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by module and by file, with a folder and without; frozen with the study, which may be moved."""
    monkeypatch.setattr("dryfit.study.observers.FINISH_S", 1.0)
    monkeypatch.setattr("dryfit.study.observers.MAKE_S", 1.0)
    plain = write_listeners(tmp_path / "plain", "listen_plain")
    folder = write_listeners(tmp_path / "here", "listen_here", ".py:Rows", ":raises", ".py:hangs", ".py:Hangs")
    assert run_here("tune", plain, "--quiet").returncode == ExitStatus.DONE
    done = run_here("tune", folder, "--quiet")
    assert (done.returncode, ends(folder)) == (ExitStatus.DONE, ends(plain)), done.stderr
    assert heard(folder / "listen_here.db") == told(folder)
    assert done.stderr.count("listen_here:raises raised ConnectionError: no tracker here; it is detached") == 1
    assert done.stderr.count("listen_here.py:hangs had not finished 1 s after the end") == 1
    assert done.stderr.count("listen_here.py:Hangs had not finished 1 s after the end") == 1

    (folder / "study.toml").unlink()
    resumed = run_here("resume", folder, "--trials", "4")
    assert resumed.returncode == ExitStatus.DONE and len(ends(folder)) == 4, resumed.stderr
    assert heard(folder / "listen_here.db") == told(folder)
    assert str(folder) not in (folder / "frozen.toml").read_text(encoding="utf-8").partition("listeners")[2]


@pytest.mark.slow
def test_a_hung_listener_does_not_keep_the_process(tmp_path: Path) -> None:
    folder = write_listeners(tmp_path / "study", "listen_hung", ".py:Hangs")
    done = run("tune", folder, "--json")
    assert done.returncode == ExitStatus.DONE, done.stderr
    assert json.loads(done.stdout)["trials"]["complete"] == len(ends(folder)) == 3
    assert "listen_hung.py:Hangs had not finished 10 s after the end of the session" in done.stderr
    assert "time.sleep(60)" in log_of(folder)


@pytest.mark.parametrize(
    ("listener", "code", "said"),
    [
        ("absent.py:make", "", "there is no file .*absent.py"),
        ("nowhere_at_all.module:make", "", "there is no module nowhere_at_all"),
        ("FILE.py:mak", "def make(): ...", r"FILE.py has no mak .*next: did you mean make\?"),
        ("FILE.py:make", "make = 3", "it is a int.*a function without arguments that returns an observer"),
        ("FILE.py:make", "def make(study): ...", r"it takes \(study\): missing a required argument"),
        ("FILE.py:make", "def make(): ...", "the NoneType has no method on_open, on_event, on_message, on_note"),
        (
            "FILE.py:Half",
            "class Half:\n    def on_note(self, text): ...",
            "Half has no method on_open, on_event, on_mess",
        ),
        ("FILE.py:make", "import sys\nsys.exit(3)", r"it raised SystemExit: 3 .*FILE.py:2\)"),
        ("FILE.py:make", "1 / 0", r"it raised ZeroDivisionError: division by zero .*FILE.py:1\)"),
        ("FILE.py:make", "import a_package_that_nobody_has", "it raised ModuleNotFoundError: No module named 'a_pack"),
    ],
)
def test_a_listener_that_is_none_is_refused_before_anything_runs(
    tmp_path: Path, listener: str, code: str, said: str, request: pytest.FixtureRequest
) -> None:
    name = f"listen_wrong_{abs(hash(request.node.name))}"
    folder = write_listeners(tmp_path / "study", listener.replace("FILE", name), "")
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    done = run_here("tune", folder)
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert re.search(said.replace("FILE", name), done.stderr, re.DOTALL), done.stderr
    assert not (folder / "ledger.jsonl").exists() and not (folder / "logs").exists()


def test_looking_at_a_study_imports_no_listener(tmp_path: Path) -> None:
    folder = write_listeners(tmp_path / "study", "listen_unused", ".py:Rows")
    code = f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n1 / 0\n"
    (folder / "listen_unused.py").write_text(code, encoding="utf-8")
    assert run_here("tune", folder, "--dry-run").returncode == ExitStatus.DONE
    assert not (tmp_path / "imported").exists()
    assert run_here("tune", folder).returncode == ExitStatus.CANNOT_RUN
    assert (tmp_path / "imported").exists()
