"""Several studies in a row: what is checked before the first, what follows what, and the one summary."""

import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ledgers
from dryfit.documents.summary import several_table
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import ChildError, ConfigError, DataError, ExitStatus, InternalError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.trial import Outcome
from dryfit.study import studies
from dryfit.study.next_step import End
from dryfit.study.session import SessionResult
from dryfit.study.studies import StudyRun, Turn, overall, tune_all

TEXT = '[study]\ntask = "objective"\n{study}\n[objective]\nfunction = "nowhere:f"\n[space]\nx = [1]\n{more}'

Session = Callable[[StudyLayout], SessionResult]


def write(folder: Path, name: str, *, study: str = "", more: str = "") -> Path:
    """A study of which nothing exists but its file."""
    file = folder / f"{name}.toml"
    file.write_text(TEXT.format(study=f'name = "{name}"\n{study}', more=more), encoding="utf-8")
    return file


def ended(layout: StudyLayout, end: End, *outcomes: Outcome) -> SessionResult:
    """A session that has ended so."""
    script = ledgers.begun(name=layout.folder.name)
    for number, outcome in enumerate(outcomes):
        script.ask(number, {"head.dropout": 0.1})
        script.place(number)
        script.finish(number, outcome, 0.5 + number / 10 if outcome is Outcome.COMPLETE else None)
    script.close(end)
    return SessionResult(end, script.state(), layout)


@dataclass
class Sessions:
    """Stands in for the sessions of studies.

    Attributes:
        made: By a study's name, what becomes of it; any other is done.
        began: The configurations of those that began, in order.
    """

    made: dict[str, Session] = field(default_factory=dict[str, Session])
    began: list[StudyConfig] = field(default_factory=list[StudyConfig])

    def run(self, config: StudyConfig, _space: object, layout: StudyLayout, *_: object) -> SessionResult:
        """As :func:`dryfit.study.session.run_session`."""
        self.began.append(config)
        return self.made.get(config.study.name, done)(layout)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    stand_in = Sessions()
    monkeypatch.setattr(studies, "run_session", stand_in.run)
    return stand_in


def done(layout: StudyLayout) -> SessionResult:
    return ended(layout, End.DONE, Outcome.COMPLETE)


def raising(error: Exception) -> Session:
    def session(_: StudyLayout) -> SessionResult:
        raise error

    return session


# ---- before the first


def test_every_problem_of_every_file_is_told_and_nothing_begins(
    tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_STORAGE", raising=False)
    good, wrong = write(tmp_path, "good"), write(tmp_path, "wrong", study="trails = 3\ndirektion = 1")
    searched = write(tmp_path, "searched", more="[[search.enqueue]]\nx = 7\n")
    mirrored = write(tmp_path, "mirrored", more='[search]\nmirror = "env:NO_SUCH_STORAGE"\n')
    (tmp_path / "linked").symlink_to(tmp_path)
    files = [good, wrong, tmp_path / "absent.toml", searched, mirrored, tmp_path / "linked/good.toml"]
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError) as caught:
        tune_all(files)
    text = str(caught.value)
    assert text.startswith("reading 6 studies: 5 cannot run:\n  ") and "\nnone has begun    [CONFIG]" in text
    assert "study.trails" in text and "study.direktion" in text and "did you mean trials?" in text
    assert "absent.toml" in text
    assert f"(searched.toml:10), of {searched}: " in text
    assert f'opening search.mirror = "env:NO_SUCH_STORAGE", of {mirrored}: ' in text
    assert "NO_SUCH_STORAGE is not set" in text
    assert f"it lives in {tmp_path / 'good'}, and so does {good}" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert sessions.began == []


def test_a_lone_problem_keeps_its_own_error(tmp_path: Path, sessions: Sessions) -> None:
    with pytest.raises(ConfigError, match=r"reading .*b\.toml, line 4") as caught:
        tune_all([write(tmp_path, "a"), write(tmp_path, "b", study="trails = 3")])
    assert caught.value.hint == "did you mean trials?"
    with pytest.raises(ConfigError, match="none was named"):
        tune_all([])
    assert sessions.began == []


def test_a_folder_and_its_file_are_the_same_study(tmp_path: Path, sessions: Sessions) -> None:
    (tmp_path / "one").mkdir()
    write(tmp_path / "one", "study")
    same = tmp_path / "one.toml"
    same.write_text((tmp_path / "one/study.toml").read_text())  # another file, in whose folder the first one lives
    for twice in ([tmp_path / "one", tmp_path / "one/study.toml"], [tmp_path / "one", same]):
        with pytest.raises(ConfigError, match="which was named before it"):
            tune_all(twice)
    assert sessions.began == []


def test_what_is_set_holds_for_all(tmp_path: Path, sessions: Sessions) -> None:
    tune_all([write(tmp_path, "a"), write(tmp_path, "b", study="seed = 2")], overrides=["study.seed=9"], trials=7)
    seen = [config.study for config in sessions.began]
    assert [(study.name, study.trials, study.seed) for study in seen] == [("a", 7, 9), ("b", 7, 9)]


# ---- what follows what


def test_one_that_fails_pauses_or_cannot_run_keeps_none_from_running(tmp_path: Path, sessions: Sessions) -> None:
    names = "abcdef"
    sessions.made["a"] = raising(DataError("reading rows", "there are none"))
    sessions.made["b"] = lambda layout: ended(layout, End.PAUSED)
    sessions.made["c"] = lambda layout: ended(layout, End.TOO_MANY_FAILURES, Outcome.FAILED, Outcome.FAILED)
    sessions.made["d"] = raising(ChildError("checking data", "the process died"))
    sessions.made["e"] = lambda layout: ended(layout, End.STOPPED, Outcome.COMPLETE)  # by `dryfit stop`: this one alone
    turns: list[Turn] = []
    ends: list[StudyRun] = []
    result = tune_all([write(tmp_path, name) for name in names], on_turn=turns.append, on_end=ends.append)
    assert [(turn.number, turn.of, turn.name) for turn in turns] == [(n + 1, 6, name) for n, name in enumerate(names)]
    assert [turn.folder for turn in turns] == [tmp_path / name for name in names]
    assert tuple(ends) == result.studies
    assert [run.status for run in result.studies] == [2, 3, 1, 2, 3, 0]
    assert result.status is ExitStatus.STOPPED
    found = json.loads(result.summary.model_dump_json(by_alias=True))
    assert (found["schema"], found["status"]) == (1, 3)
    assert [one["study"] for one in found["studies"]] == list(names)
    assert [one["end"] for one in found["studies"]] == [
        "error",
        "paused",
        "too_many_failures",
        "error",
        "stopped",
        "done",
    ]
    assert "there are none" in found["studies"][0]["error"] and found["studies"][5]["error"] is None
    assert found["studies"][0]["summary"] is None
    assert found["studies"][2]["summary"]["trials"]["failed"] == 2
    assert found["studies"][5]["summary"]["best"]["value"] == 0.5


@pytest.mark.parametrize("how", ["raised", "of a trial"])
def test_an_internal_error_stops_all(tmp_path: Path, sessions: Sessions, how: str) -> None:
    broken = raising(InternalError("working", "an invariant broke"))
    sessions.made["b"] = broken if how == "raised" else lambda layout: ended(layout, End.BROKEN)
    result = tune_all([write(tmp_path, name) for name in "abc"])
    assert [run.status for run in result.studies] == [0, 4, None]
    assert (result.status, result.stopped) == (ExitStatus.BUG, None)
    assert [entry.end for entry in result.summary.studies][2] == "not_begun"


def test_an_error_that_is_nobodys_is_not_hidden(tmp_path: Path, sessions: Sessions) -> None:
    sessions.made["a"] = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        tune_all([write(tmp_path, "a"), write(tmp_path, "b")])


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 3), (signal.SIGHUP, 3), (signal.SIGUSR2, 3)]
)
@pytest.mark.parametrize("when", ["as the first lets go", "between", "as the second begins"])
def test_a_signal_at_any_moment_begins_no_further_one(
    tmp_path: Path, sessions: Sessions, number: signal.Signals, status: int, when: str
) -> None:
    """Also where the session that runs is done all the same, and where none runs."""
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)]

    def signalled(layout: StudyLayout) -> SessionResult:
        os.kill(os.getpid(), number)
        return done(layout)

    def on_end(run: StudyRun) -> None:
        if when == "between" and run.turn.number == 1:
            os.kill(os.getpid(), number)

    def on_turn(turn: Turn) -> None:
        if when == "as the second begins" and turn.number == 2:
            os.kill(os.getpid(), number)

    sessions.made |= {"a": signalled} if when == "as the first lets go" else {}
    result = tune_all([write(tmp_path, name) for name in "abc"], on_turn=on_turn, on_end=on_end)
    worked_on = 2 if when == "as the second begins" else 1  # that one's own session hears of it
    assert [run.status for run in result.studies] == [0] * worked_on + [None] * (3 - worked_on)
    assert [run.worked_on for run in result.studies] == [True] * worked_on + [False] * (3 - worked_on)
    assert result.status == status
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)]


def test_a_signal_after_the_last_study_is_done_changes_nothing(tmp_path: Path, sessions: Sessions) -> None:
    result = tune_all([write(tmp_path, "a")], on_end=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (result.status, result.stopped) == (ExitStatus.DONE, None)


# ---- the one answer


def test_the_gravest_status_counts() -> None:
    order = [ExitStatus(status) for status in (130, 4, 3, 2, 1, 0)]
    assert sorted(order) == sorted(ExitStatus)
    for count in (1, 2, 3):
        for some in itertools.permutations(order, count):
            assert overall(some) is order[min(map(order.index, some))]


def test_what_a_study_was_before_is_told_where_it_cannot_run(tmp_path: Path, sessions: Sessions) -> None:
    before = ledgers.begun(name="a")
    before.complete(0, {"head.dropout": 0.1}, [0.7])
    before.write(tmp_path / "a")
    sessions.made["a"] = raising(DataError("reading rows", "there are none"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/ledger.jsonl").write_text("no JSON\n")
    result = tune_all([write(tmp_path, "a"), write(tmp_path, "b"), write(tmp_path, "c")])
    first, second, third = result.summary.studies
    assert first.summary is not None and first.summary.trials.complete == 1
    assert second.error is None  # the stand-in read nothing
    table = several_table(result.summary)
    rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    assert list(rows[0]) == ["study", "task", "complete", "of", "best", "exit", "ended", "time", "folder"]
    assert [rows[0][key] for key in ("complete", "best", "exit", "ended")] == ["1", "f1_macro 0.7000", "2", "error"]
    assert [rows[2][key] for key in ("study", "exit", "ended", "folder")] == ["c", "0", "done", third.folder]


def test_secrets_do_not_reach_the_summary(tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    sessions.made["a"] = raising(DataError("reading rows", "the hub refused hunter2-hunter2"))
    (entry,) = tune_all([write(tmp_path, "a")]).summary.studies
    assert entry.error is not None and "refused <MY_TOKEN>" in entry.error
