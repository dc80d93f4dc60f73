"""A killed control process: what its agents still run goes on under the next one, and nothing else does."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import BaseModel

from dryfit.documents.live_study import LiveStudy, Vitals
from dryfit.documents.story import trial_story
from dryfit.ledger.events import AttemptPlaced, AttemptStarted, Event, NodeJoined, NodeLost
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.agent import AgentChildren
from dryfit.processes.agent_link import installation, listening, own_identity, publish
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildMessage
from dryfit.processes.connection import Connection
from dryfit.processes.joined_nodes import JoinedNodes, LeftRunning, Listener, Terms, left_running
from dryfit.processes.node import HostMemory, LocalNode, NodeFacts
from dryfit.processes.node_messages import (
    FROM_CONTROL,
    AnswerChild,
    Beat,
    BeatHeard,
    Ended,
    FromControl,
    Hello,
    Identity,
    KillChild,
    Said,
    Side,
    Welcome,
    new_token,
)
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.wire import Job, Started, Verdict
from ledgers import Script

TOKEN = new_token()
FACTS = NodeFacts(cores=4, host_bytes=1 << 30)
WELCOME = Welcome(
    node="",
    session="new",
    heard=0,
    lease_s=10.0,
    marker="marker",
    folder="/study",
    needs=(),
    isolation=Isolation.FRESH,
    preload=(),
    jobs=(Job.OBJECTIVE,),
)


class Here:
    """This machine, where nothing runs."""

    name, facts = "here", FACTS

    def wait(self, _timeout_s: float) -> Sequence[ChildEvent]:
        return ()


@dataclass
class Resumed:
    """The next control process, and the agent that may come back."""

    nodes: JoinedNodes
    listener: Listener
    identity: Identity
    written: list[Event]
    now: list[float]
    gone: list[Identity]
    said: list[FromControl] = field(default_factory=list[FromControl])
    connection: Connection | None = None

    def turn(self) -> list[ChildEvent]:
        events: list[ChildEvent] = []
        for _ in range(6):
            events += self.nodes.wait(0.01)
            if self.connection is not None:
                self.said += [FROM_CONTROL.validate_json(line) for line in self.connection.receive()]
        return events

    def come_back(self, **changed: object) -> list[ChildEvent]:
        """The agent dials, and says what it runs."""
        if self.connection is not None:
            self.connection.close()
        self.connection = Connection(socket.create_connection(self.listener.address), Side.AGENT, TOKEN)
        self.turn()
        known = {"epoch": 3, "session": "old", "running": ("trial-0-1", "trial-7-2"), "acknowledged": 40, "heard": 9}
        hello = {"code": installation(), "facts": FACTS, **known, **changed}
        return self.say(Hello(identity=self.identity, **hello))  # type: ignore[arg-type]

    def say(self, message: BaseModel) -> list[ChildEvent]:
        assert self.connection is not None
        self.connection.send(message)
        return self.turn()

    def beat(self) -> list[ChildEvent]:
        return self.say(Beat(beat=1, heard=0, devices={}, memory=HostMemory(1, 1)))


@pytest.fixture
def resumed(tmp_path: Path) -> Iterator[Resumed]:
    now, written, gone, identity = [1000.0], list[Event](), list[Identity](), own_identity()

    def clock() -> float:
        now[0] += 0.004
        return now[0]

    joined = NodeJoined(
        node="n1",
        agent=identity.agent,
        epoch=3,
        host=identity.host,
        pid=identity.pid,
        boot=identity.boot,
        started=identity.started,
        cores=4,
        host_bytes=1 << 30,
        devices=(),
    )
    left = LeftRunning(joined, {f"trial-{number}-1": tmp_path / str(number) for number in (0, 1)})
    listener = Listener(listening("127.0.0.1", 0), TOKEN, clock)
    terms = Terms(WELCOME, "study", grace_s=2.0, here=False, names={identity.agent: "n1"}, left={"n1": left})
    nodes = JoinedNodes(Here(), listener, terms, written.append, str, clock, gone.__contains__)  # type: ignore[arg-type]
    made = Resumed(nodes, listener, identity, written, now, gone)
    yield made
    if made.connection is not None:
        made.connection.close()
    nodes.close("over")
    listener.close()


def test_what_an_agent_still_runs_goes_on_and_what_it_does_not_is_lost(resumed: Resumed) -> None:
    assert resumed.come_back() == [], "nobody has taken over yet"
    welcome = resumed.said[0]
    assert isinstance(welcome, Welcome) and (welcome.node, welcome.heard) == ("n1", 40)
    killed = resumed.said[1]
    assert isinstance(killed, KillChild) and killed.key == "trial-7-2", "the ledger has no such attempt open"
    started = Said(number=41, key="trial-0-1", message=Started(pid=7, overhead_ms=1.0))
    assert resumed.say(started) == [] and resumed.beat() == []
    heard = resumed.said[-1]
    assert isinstance(heard, BeatHeard) and heard.heard == 40, "nothing is acknowledged before it is on record"
    assert resumed.nodes.take_going_on() == {"trial-0-1": "n1", "trial-1-1": "n1"}
    lost, message = resumed.turn()
    assert isinstance(lost, ChildExited) and lost.key == "trial-1-1" and lost.evidence.server_lost
    assert isinstance(message, ChildMessage) and message.message == started.message
    resumed.beat()
    heard = resumed.said[-1]
    assert isinstance(heard, BeatHeard) and heard.heard == 41
    resumed.nodes.all()["n1"].answer("trial-0-1", Verdict(n=1, proceed=True))
    resumed.turn()
    answered = resumed.said[-1]
    assert isinstance(answered, AnswerChild) and answered.number == 2, "numbers begin anew with the control process"
    (ended,) = resumed.say(Ended(number=42, key="trial-0-1", result=None, evidence=Evidence(exit_code=3)))
    assert isinstance(ended, ChildExited) and ended.evidence.exit_code == 3
    assert [type(event) for event in resumed.written] == [NodeJoined]


def test_an_agent_that_did_not_hear_its_welcome_comes_back_once_more(resumed: Resumed) -> None:
    resumed.come_back()
    resumed.nodes.take_going_on()
    resumed.turn()
    resumed.say(Said(number=41, key="trial-0-1", message=Started(pid=7, overhead_ms=1.0)))
    before = len(resumed.said)
    assert resumed.come_back(heard=9) == []
    welcome, killed = resumed.said[before:]
    assert isinstance(welcome, Welcome) and welcome.heard == 41
    assert isinstance(killed, KillChild), "it is told again what it may not have heard"
    assert [type(event) for event in resumed.written] == [NodeJoined]


def test_children_that_were_ended_meanwhile_are_lost_at_once(resumed: Resumed) -> None:
    resumed.nodes.take_going_on()
    events = resumed.come_back(epoch=4, session="", running=(), acknowledged=0)
    assert sorted(event.key for event in events if isinstance(event, ChildExited)) == ["trial-0-1", "trial-1-1"]
    assert [type(event) for event in resumed.written] == [NodeLost, NodeJoined]


@pytest.mark.parametrize("certain", [True, False])
def test_agents_that_do_not_come_back_are_not_waited_for_long(certain: bool, resumed: Resumed) -> None:
    resumed.nodes.take_going_on()
    resumed.now[0] += 100.0  # before anybody listens
    assert resumed.turn() == []
    if certain:
        resumed.gone.append(resumed.identity)
    else:
        resumed.now[0] += 16.0
        assert resumed.turn() == []
        resumed.now[0] += 2.0
    events = resumed.turn()
    assert {event.key for event in events} == {"trial-0-1", "trial-1-1"}
    assert all(isinstance(event, ChildExited) and event.evidence.server_lost for event in events)
    assert [event.trials for event in resumed.written if isinstance(event, NodeLost)] == [2]


def test_a_stop_that_the_earlier_session_asked_for_pauses_nothing(resumed: Resumed) -> None:
    resumed.nodes.take_going_on()
    resumed.come_back(running=("trial-0-1", "trial-1-1"))
    result = ChildResult(TrainResult(value=None, best=None, steps=2, stopped_by=StopReason.REQUEST))
    asked = Evidence(exit_code=0, stop_asked=True)
    (wrote,) = resumed.say(Ended(number=41, key="trial-0-1", result=result.to_json(), evidence=asked))
    assert isinstance(wrote, ChildExited)
    trained = training_of(wrote.result)
    assert trained is not None and trained.stopped_by is StopReason.SIGTERM, "its trial goes on"
    (killed,) = resumed.say(Ended(number=42, key="trial-1-1", result=None, evidence=asked))
    assert isinstance(killed, ChildExited) and killed.evidence.server_lost


def script_of(*ends: str | None) -> Script:
    """Sessions that ended so, None being a kill; in the first of them trials 0 and 1 run on n1, 2 here, 3 on n2."""
    script = Script()
    script.begin()
    for name in ("n1", "n2"):
        script.say(NodeJoined(node=name, agent="a" * 16, epoch=1, host="h", pid=1, cores=1, host_bytes=1, devices=()))
    for number, node in enumerate(("n1", "n1", "here", "n2")):
        script.ask(number, {"optim.lr": 1e-4})
        script.say(AttemptPlaced(number=number, attempt=1, node=node))
    script.say(AttemptStarted(number=0, attempt=1, pid=5, overhead_ms=1.0))
    script.say(NodeLost(node="n2", epoch=1, why="its agent was ended", trials=1))
    for at, end in enumerate(ends):
        if at:
            script.open()
        if end is not None:
            script.close(end)
    script.open()
    return script


@pytest.mark.parametrize(("ends", "keys"), [((None,), 2), ((None, None), 2), (("done",), 0), ((None, "stopped"), 0)])
def test_what_may_still_run_is_what_no_session_has_ended(
    ends: tuple[str | None, ...], keys: int, tmp_path: Path
) -> None:
    left = left_running(script_of(*ends).state(), StudyLayout(tmp_path))
    assert set(left) == ({"n1"} if keys else set())
    for found in left.values():
        assert sorted(found.children) == ["trial-0-1", "trial-1-1"]
        assert found.children["trial-1-1"] == StudyLayout(tmp_path).trial(1).attempt(1)


def test_an_attempt_belongs_to_the_session_that_goes_on_with_it() -> None:
    script = script_of(None)
    script.say(AttemptStarted(number=0, attempt=1, pid=5, overhead_ms=1.0, again=True))
    state = script.state()
    first, second = (state.trials[number].attempts[0] for number in (0, 1))
    assert (first.end.value, second.end.value) == ("running", "lost")
    story = trial_story(state, 0, script.events, StudyLayout(Path("/study")))
    assert story.moments[-1].text == "goes on under another session (process 5)"
    live = LiveStudy(vitals=lambda *_: Vitals(None, None))
    live.on_open(StudyLayout(Path("/study")))
    for event in script.events[-2:]:  # all that the new session's own view has seen
        live.on_event(event, state)
    assert [(trial.number, trial.node) for trial in live.view().trials] == [(0, "n1")]


def test_children_go_on_only_under_a_control_process_that_would_make_them_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = StudyLayout(tmp_path)
    layout.nodes.mkdir()
    publish(layout, ("127.0.0.1", 4), "study", "old")
    welcome = WELCOME.model_copy(update={"folder": str(tmp_path), "node": "n1", "session": "old"})
    started = Started(pid=7, overhead_ms=1.0)
    monkeypatch.setattr(LocalNode, "start", lambda *_: None)
    with closing(AgentChildren(welcome, "0" * 16, lambda _: None)) as children:
        children._running = {"trial-0-1": started, "trial-1-1": None}
        assert children.serve(welcome.model_copy(update={"session": "new", "jobs": (Job.SCRIPT,)})) is None
        told = children.serve(welcome.model_copy(update={"session": "new", "heard": 40, "lease_s": 5.0}))
        assert told is not None
        assert list(told) == [Said(number=0, key="trial-0-1", message=started)]
