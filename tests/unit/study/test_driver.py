"""The loop that acts: what counts of what is heard, and where a child is answered."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildLimits, ChildMessage, ChildSpec
from dryfit.processes.node import LocalNode
from dryfit.settings.check_messages import CheckRequest, CheckResult, Health, Subject
from dryfit.settings.errors import ChildError, ChildFault, DataError, Evidence, InternalError
from dryfit.settings.jobs import ChildResult
from dryfit.settings.training_messages import MergeResult
from dryfit.settings.wire import ErrorParts, Note
from dryfit.study.child_jobs import ChildJob, run_job, run_side_by_side
from dryfit.study.driver import StopRequests, drive
from dryfit.study.next_step import End
from quiet_children import QuietChildren

LIMITS = ChildLimits(start_s=1, hang_s=1, total_s=None, stop_grace_s=1)


class Listed(QuietChildren):
    """Children that keep a list of what they were told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []

    def start(self, spec: ChildSpec) -> None:
        self.started.append(spec.key)

    def kill(self, key: str, why: str = "now") -> None:
        self.killed.append(key)


class Script:
    """Nodes that say what a test has written down, one event at a time."""

    def __init__(self, events: Sequence[ChildEvent]) -> None:
        self.children = {name: Listed() for name in ("n1", "n2")}
        self._events = deque(events)
        self._nodes = {name: LocalNode(children, name=name) for name, children in self.children.items()}

    def all(self) -> Mapping[str, LocalNode]:
        return self._nodes

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        return [self._events.popleft()]

    def take_going_on(self) -> Mapping[str, str]:
        return {}

    def wake(self) -> None: ...


@dataclass
class OneTrial:
    """A trial whose first attempt runs on a node, and, once that has ended, its second on another."""

    waiting: list[ChildSpec]
    running: dict[str, int] = field(default_factory=dict)
    heard: list[tuple[int, str]] = field(default_factory=list)

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        if self.running:
            return 0.0
        if not self.waiting:
            return None
        spec = self.waiting.pop(0)
        self.running[spec.key] = len(self.waiting)
        return [spec]

    def on_stop(self, why: End) -> None: ...

    def on_message(self, child: int, event: ChildMessage) -> None:
        assert isinstance(event.message, Note)
        self.heard.append((child, event.message.text))

    def on_exit(self, child: int, event: ChildExited) -> None:
        del self.running[event.key]


def spec(key: str, place: str, folder: Path) -> ChildSpec:
    return ChildSpec(key, folder / key, CheckRequest(folder="f", task=None, trust=False), LIMITS, place)


def said(key: str, text: str, node: str) -> ChildMessage:
    return ChildMessage(key, Note(text=text), node)


def test_only_the_open_attempt_is_heard_and_what_else_speaks_is_killed_where_it_is(tmp_path: Path) -> None:
    """An attempt that was given up, one of the next attempt's name on another node, and a child nobody knows."""
    gone = Evidence(exit_code=1)
    nodes = Script(
        [
            said("trial-0-1", "first", "n1"),
            said("trial-0-1", "an impostor", "n2"),
            ChildExited("trial-0-1", None, gone, "n2"),
            ChildExited("trial-0-1", None, gone, "n1"),
            said("trial-0-1", "late", "n1"),
            said("trial-0-2", "second", "n2"),
            said("trial-7-1", "who is this", "n2"),
            ChildExited("trial-0-1", None, gone, "n1"),
            ChildExited("trial-0-2", None, gone, "n2"),
        ]
    )
    work = OneTrial([spec("trial-0-1", "n1/0,n1/1", tmp_path), spec("trial-0-2", "n2/cpu", tmp_path)])
    drive(work, nodes)
    assert work.heard == [(1, "first"), (0, "second")]
    assert nodes.children["n1"].started == ["trial-0-1"] and nodes.children["n2"].started == ["trial-0-2"]
    assert nodes.children["n1"].killed == ["trial-0-1"]
    assert nodes.children["n2"].killed == ["trial-0-1", "trial-7-1"]


# ---- One job whose answer is waited for: what is repeated, what is raised, what is given up


HEALTH = CheckResult(health=Health(folder="f", subject=Subject.MODEL, healthy=True))
ANSWER = ChildResult(HEALTH)
KILLED = Evidence(signal=9)


@dataclass
class Scripted(QuietChildren):
    """A supervisor whose children end as the script says."""

    ends: list[tuple[ChildResult | None, Evidence]]
    started: list[ChildSpec] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    def start(self, spec: ChildSpec) -> None:
        spec.folder.mkdir(parents=True)
        self.started.append(spec)

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        result, evidence = self.ends.pop(0)
        other = ChildExited("another", None, KILLED)
        return [other, ChildExited(self.started[-1].key, result, evidence)]

    def kill(self, key: str, why: str = "now") -> None:
        self.killed.append(key)


def send(script: Scripted, folder: Path, **more: Any) -> CheckResult | None:
    body = CheckRequest(folder="f", task=None, trust=False)
    limits = ChildLimits(start_s=1, hang_s=1, total_s=None, stop_grace_s=1)
    return run_job(ChildJob("looking at f", body, folder, limits), LocalNode(script), **more)


def test_a_child_that_was_killed_is_sent_again(tmp_path: Path) -> None:
    script = Scripted([(None, KILLED), (None, KILLED), (ANSWER, Evidence(exit_code=0))])
    assert send(script, tmp_path / "tries") == HEALTH
    assert [spec.folder.name for spec in script.started] == ["0001", "0002", "0003"]
    assert len({spec.key for spec in script.started}) == 3
    again = Scripted([(ANSWER, Evidence(exit_code=0))])
    send(again, tmp_path / "tries")
    assert again.started[0].folder.name == "0004"


def test_what_the_child_raised_is_raised(tmp_path: Path) -> None:
    parts = ErrorParts(code="DATA", doing="reading x", found="7", allowed="0 or 1", hint="look")
    fault = ChildFault(type_names=("dryfit.settings.errors.DataError",), code="DATA", message="")
    with pytest.raises(DataError) as caught:
        send(Scripted([(ChildResult(fault=fault, error=parts), Evidence(exit_code=1))]), tmp_path)
    assert (caught.value.doing, caught.value.found, caught.value.hint) == ("reading x", "7", "look")


def test_the_answer_of_another_job_is_refused(tmp_path: Path) -> None:
    other = ChildResult(MergeResult(out="f", size_bytes=1))
    with pytest.raises(InternalError, match="(?s)doing the job check: its answer is MergeResult.*CheckResult"):
        send(Scripted([(other, Evidence(exit_code=0))]), tmp_path)


def test_another_exception_and_too_many_deaths_say_where_the_log_is(tmp_path: Path) -> None:
    fault = ChildFault(type_names=("builtins.KeyError",), code="", message="'xx'")
    with pytest.raises(ChildError, match="KeyError: 'xx'") as caught:
        send(Scripted([(ChildResult(fault=fault), Evidence(exit_code=1, fault=fault))]), tmp_path / "a")
    assert str(tmp_path / "a/0001/log.txt") in caught.value.hint
    script = Scripted([(None, KILLED)] * 9)
    with pytest.raises(ChildError, match="looking at f: the process ended without an answer"):
        send(script, tmp_path / "b")
    assert len(script.started) == 4


def test_a_stop_ends_it(tmp_path: Path) -> None:
    @dataclass
    class Stopped(Scripted):
        """A child that works when the stop is asked for."""

        def wait(self, timeout_s: float) -> list[ChildEvent]:
            stops.why = End.STOPPED
            return []

    stops, script = StopRequests(tmp_path / "stop", lambda: None), Stopped([])
    assert send(script, tmp_path / "tries", stops=stops) is None
    assert script.killed == [script.started[0].key]
    assert send(script, tmp_path / "again", stops=stops) is None
    assert len(script.started) == 1, "a stop that was asked for before starts nothing"


@dataclass
class Several(QuietChildren):
    """A supervisor of which each child ends when it is waited for, the last started first."""

    results: dict[str, list[tuple[ChildResult | None, Evidence]]]
    running: list[ChildSpec] = field(default_factory=list)
    most: int = 0

    def start(self, spec: ChildSpec) -> None:
        spec.folder.mkdir(parents=True)
        self.running.append(spec)
        self.most = max(self.most, len(self.running))

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        spec = self.running.pop()
        return [ChildExited(spec.key, *self.results[spec.folder.parent.name].pop(0))]


def test_several_jobs_run_side_by_side_and_one_death_spoils_no_other(tmp_path: Path) -> None:
    good = (ANSWER, Evidence(exit_code=0))
    script = Several({"a": [good], "b": [(None, KILLED)] * 4, "c": [(None, KILLED), good], "d": [good]})
    body = CheckRequest(folder="f", task=None, trust=False)
    limits = ChildLimits(start_s=1, hang_s=1, total_s=None, stop_grace_s=1)
    jobs = [ChildJob("looking", body, tmp_path / name, limits) for name in "abcd"]
    told: list[int] = []
    answers = run_side_by_side(jobs, LocalNode(script), most=2, on_done=told.append)
    assert [isinstance(answer, ChildError) for answer in answers] == [False, True, False, False]
    assert answers[2] == HEALTH
    assert sorted(told) == [0, 1, 2, 3]
    assert script.most == 2


def test_what_a_child_of_several_raises_ends_them_all(tmp_path: Path) -> None:
    parts = ErrorParts(code="DATA", doing="reading x", found="7")
    fault = ChildFault(type_names=("dryfit.settings.errors.DataError",), code="DATA", message="")
    script = Several({"a": [(ChildResult(fault=fault, error=parts), Evidence(exit_code=1))]})
    body = CheckRequest(folder="f", task=None, trust=False)
    job = ChildJob("looking", body, tmp_path / "a", ChildLimits(start_s=1, hang_s=1, total_s=None, stop_grace_s=1))
    with pytest.raises(DataError):
        run_side_by_side([job], LocalNode(script), most=2, on_done=lambda _: None)
