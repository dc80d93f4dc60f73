"""The control process dies before, in the middle of and after events of every kind: the whole study stays the same."""

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any, get_args

import pytest

import dying_control
from chaos import failures
from dryfit.ledger import events
from dryfit.ledger.events import Event, TrialFinished
from dryfit.settings.trial import Outcome
from dryfit.study.next_step import End
from kill_points import KNOWN, Killed, OutlivingSupervisor, Way, killed_at, study_session
from study_runs import DEADLINE_S, ends, events_of, fold, marked_processes, objective_study, run

TRIALS = 8
SEARCHES: dict[str, dict[str, dict[str, Any]]] = {
    "tpe-median": {
        "search": {"sampler": "tpe", "startup_trials": 3, "pruner": "median", "pruner_startup_trials": 2},
    },
    "tpe-asha": {"search": {"sampler": "tpe", "startup_trials": 3, "pruner": "asha"}},
    "random, two side by side": {"search": {"sampler": "random"}, "runtime": {"parallel": 2}},
}
KINDS = {one.model_fields["type"].default for one in get_args(get_args(events.Event)[0])}
# What no study of the tests writes by itself, each with the reason.
NOT_HERE = {
    "device_set_aside": "a device that is set aside is one of a GPU machine",
    "node_joined": "a study that listens for agents has them: tests/chaos/test_nodes.py",
    "node_lost": "the same",
    "study_revised": "a study that changes is killed in tests/contract/test_study_changes.py",
    "generation_began": "the same",
}


def tables(search: str) -> dict[str, Any]:
    own = SEARCHES[search]
    return {
        **own,
        "study": {"trials": TRIALS},
        "search": {**own["search"], "mirror": "none", "defaults_first": False, "enqueue": list(KNOWN)},
        "runtime": {"max_failed_in_a_row": 20, **own.get("runtime", {})},
    }


def all_that_counts(folder: Path) -> list[Any]:
    """Every trial's end, reports, verdicts and reason; how often it was tried is for the kills to say."""
    state = fold(folder)
    verdicts = [[(n, one.proceed, one.reason) for n, one in trial.verdicts.items()] for trial in state.trials]
    return [ends(folder), verdicts, [trial.reason for trial in state.trials], state.counts]


def assert_same(folder: Path, whole: Path, where: str) -> None:
    assert all_that_counts(folder) == all_that_counts(whole), where
    finished = Counter(event.number for event in events_of(folder) if isinstance(event, TrialFinished))
    assert set(finished.values()) == {1} and len(finished) == len(fold(folder).trials), where
    assert fold(folder).open_trials == [], where


def undisturbed(patch: pytest.MonkeyPatch, folder: Path, search: str) -> list[Event]:
    assert study_session(patch, folder, tables(search)).end is End.DONE
    return events_of(folder)


def first_of_each_kind(whole: list[Event]) -> Iterator[int]:
    seen: set[str] = set()
    for index, event in enumerate(whole):
        if event.type not in seen:
            seen.add(event.type)
            yield index


def kill_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, search: str, *, every: bool, both: bool) -> None:
    """Kill a study at each of its events, or at the first of each kind, in each way, and hold its end to a whole one's.

    Args:
        both: With children as far as they are heard of, and as far as they can be; else with one or the other.
    """
    with monkeypatch.context() as patch:
        whole = undisturbed(patch, tmp_path / "whole", search)
    indices = range(len(whole)) if every else first_of_each_kind(whole)
    for index, (number, way) in product(indices, enumerate(Way)):
        for ahead in (False, True) if both else ((index + number) % 2 == 0,):
            where = f"{search}: {way} event {index} ({whole[index].type}), children ahead: {ahead}"
            folder = tmp_path / "killed"
            print(where)  # shown where it does not die, too
            with monkeypatch.context() as patch:
                killed_at(patch, index, way)
                with pytest.raises(Killed):
                    study_session(patch, folder, tables(search), ahead=ahead)
            with monkeypatch.context() as patch:
                assert study_session(patch, folder, tables(search), ahead=ahead).end is End.DONE, where
            assert_same(folder, tmp_path / "whole", where)
            shutil.rmtree(folder)


def test_the_studies_of_these_tests_have_events_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[str] = set()
    outcomes: set[Outcome | None] = set()
    actions: set[str] = set()
    for search in SEARCHES:
        kinds |= {event.type for event in undisturbed(monkeypatch, tmp_path / search, search)}
        state = fold(tmp_path / search)
        outcomes |= {trial.outcome for trial in state.trials}
        actions |= {action for _, action in failures(state)}
    assert kinds == KINDS - NOT_HERE.keys()
    assert outcomes == {Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED, Outcome.REFUSED}
    assert {"rung", "retry", "give_up"} <= actions


@pytest.mark.slow
@pytest.mark.parametrize("search", ["tpe-asha", "random, two side by side"])
def test_a_death_that_children_outlive_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    """As those of agents do, which say again what may not have been heard."""
    with monkeypatch.context() as patch:
        whole = undisturbed(patch, tmp_path / "whole", search)
    attempts = Counter(event.type for event in whole)["attempt_placed"]
    for number, (index, way) in enumerate(product(first_of_each_kind(whole), (Way.BEFORE, Way.AFTER))):
        where, outliving = f"{search}: {way} event {index} ({whole[index].type})", OutlivingSupervisor(number % 2 == 0)
        print(where)
        folder = tmp_path / "killed"
        with monkeypatch.context() as patch:
            killed_at(patch, index, way)
            with pytest.raises(Killed):
                study_session(patch, folder, tables(search), outliving=outliving)
        with monkeypatch.context() as patch:
            assert study_session(patch, folder, tables(search), outliving=outliving).end is End.DONE, where
        assert_same(folder, tmp_path / "whole", where)
        placed = [event for event in events_of(folder) if event.type == "attempt_placed"]
        never_began = way is Way.AFTER and whole[index].type == "attempt_placed"
        assert len(placed) == attempts + never_began, where
        shutil.rmtree(folder)


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_a_death_at_each_kind_of_event_changes_nothing_wherever_the_children_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    kill_everywhere(monkeypatch, tmp_path, search, every=False, both=True)


@pytest.mark.chaos_long
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("search", SEARCHES)
def test_a_death_at_any_event_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str) -> None:
    kill_everywhere(monkeypatch, tmp_path, search, every=True, both=True)


STUDY = objective_study(
    "walk",
    study="trials = 20\nseed = 2",
    search='sampler = "tpe"\nstartup_trials = 4\npruner = "asha"\nmirror = "none"',
)
# In the order in which they can still come: the first three are written once, or by each session, the last at the end.
REAL = (
    *("study_created", "session_opened", "resolved", "trial_asked", "attempt_placed", "attempt_started", "report"),
    *("verdict", "checkpoint", "attempt_ended", "trial_finished", "session_closed"),
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_process_killed_at_every_kind_of_event_changes_nothing(tmp_path: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    whole, folder = folders
    assert run("tune", whole, "--quiet").returncode == 0
    for kind, way in zip(REAL, cycle(Way), strict=False):
        words = [dying_control.__file__, kind, way, "tune", folder, "--quiet"]
        line = [sys.executable, *map(str, words)]
        done = subprocess.run(line, capture_output=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == -signal.SIGKILL, (kind, way, done.stderr.decode())
    assert run("resume", folder, "--quiet").returncode == 0
    assert_same(folder, whole, "after every kill")
    assert set(REAL) == {event.type for event in events_of(folder)}
    assert marked_processes(folder) == []
