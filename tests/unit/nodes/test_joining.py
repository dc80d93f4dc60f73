"""Who may join a study, what a node that is lost leaves, and that nothing stale is heard."""

import errno
import itertools
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from dryfit.documents.live_study import LiveStudy, Vitals
from dryfit.documents.story import trial_story
from dryfit.ledger.events import AttemptPlaced, AttemptStarted, Event, NodeJoined, NodeLost
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.agent import Agent, AgentChildren
from dryfit.processes.agent_link import (
    differences,
    has_ended,
    installation,
    listening,
    own_identity,
    publish,
    read_token,
    split_address,
    token_of,
)
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildLimits, ChildMessage, ChildSpec
from dryfit.processes.connection import Connection
from dryfit.processes.joined_nodes import JoinedNodes, LeftRunning, Listener, Terms, left_running
from dryfit.processes.node import HostMemory, LocalNode, NodeFacts
from dryfit.processes.node_messages import (
    FROM_AGENT,
    FROM_CONTROL,
    AgentProof,
    AnswerChild,
    Beat,
    BeatHeard,
    Command,
    Ended,
    FromControl,
    Hello,
    Identity,
    KillChild,
    Refusal,
    Said,
    Side,
    StartChild,
    StopChild,
    Welcome,
    new_token,
)
from dryfit.settings.errors import ChildFault, ConfigError, Evidence, FileError, MachineError
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.study_file import Isolation
from dryfit.settings.tables import ObjectiveSettings
from dryfit.settings.training_messages import ObjectiveRequest, ScriptRequest, StopReason, TrainResult
from dryfit.settings.wire import FirstStep, Job, Started, Verdict
from ledgers import Script, begun

TOKEN = new_token()
FACTS = NodeFacts(cores=4, host_bytes=1 << 30)
WELCOME = Welcome(
    node="",
    session="session",
    heard=0,
    lease_s=10.0,
    marker="marker",
    folder="/study",
    needs=(),
    isolation=Isolation.AUTO,
    preload=(),
    jobs=(Job.OBJECTIVE,),
)


@dataclass
class Here:
    """This machine, where nothing runs."""

    name: str = "here"
    facts: NodeFacts = FACTS

    def wait(self, _timeout_s: float) -> Sequence[ChildEvent]:
        return ()

    def wake(self) -> None:
        pass


@dataclass
class Study:
    """A study that listens, and what it has written."""

    nodes: JoinedNodes
    listener: Listener
    written: list[Event]
    notes: list[str]
    now: list[float]
    connections: list[Connection] = field(default_factory=list[Connection])

    def turn(self, agents: Sequence["Joining"] = ()) -> list[ChildEvent]:
        events: list[ChildEvent] = []
        for _ in range(6):
            for agent in agents:
                agent.turn()
            events += self.nodes.wait(0.01)
        for agent in agents:
            agent.turn()
        return events


@pytest.fixture
def study() -> Iterator[Study]:
    now, written, notes = [1000.0], list[Event](), list[str]()

    def clock() -> float:
        now[0] += 0.004
        return now[0]

    listener = Listener(listening("127.0.0.1", 0), TOKEN, clock)
    terms = Terms(WELCOME, "study-id", grace_s=2.0, here=False, names={})
    nodes = JoinedNodes(Here(), listener, terms, written.append, notes.append, clock, lambda _agent: False)  # type: ignore[arg-type]
    made = Study(nodes, listener, written, notes, now)
    yield made
    for connection in made.connections:
        connection.close()
    nodes.close("over")
    listener.close()


@dataclass
class Joining:
    """An agent of the test."""

    study: Study
    identity: Identity = field(default_factory=own_identity)
    token: str = TOKEN
    said: list[FromControl] = field(default_factory=list[FromControl])

    def __post_init__(self) -> None:
        self.connection = Connection(socket.create_connection(self.study.listener.address), Side.AGENT, self.token)
        self.study.connections.append(self.connection)

    def turn(self) -> None:
        self.said += [FROM_CONTROL.validate_json(line) for line in self.connection.receive()]

    def hello(self, **changed: object) -> FromControl | None:
        """Say hello; what is answered."""
        self.study.turn([self])
        said = {"epoch": 1, "study": "study-id", "code": installation(), "facts": FACTS, **changed}
        if self.connection.is_proved:
            self.connection.send(Hello(identity=self.identity, **said))  # type: ignore[arg-type]
        self.study.turn([self])
        return self.said[-1] if self.said else None

    def say(self, message: BaseModel) -> list[ChildEvent]:
        self.connection.send(message)
        return self.study.turn([self])

    def beat(self, leaving: str = "") -> None:
        self.say(Beat(beat=1, heard=0, devices={}, memory=HostMemory(1, 1), leaving=leaving))


def spec(folder: Path, key: str = "trial-0-1") -> ChildSpec:
    body = ObjectiveRequest(
        objective=ObjectiveSettings(function="a:b"),
        number=0,
        fingerprint="",
        params={},
        seed=0,
        attempt=1,
        reported=(),
        checkpoint_step=None,
        checkpoint_dir="",
        kept_checkpoint_dir="",
        verdict_timeout_s=1.0,
        threads=1,
    )
    return ChildSpec(key, folder, body, ChildLimits(1.0, 1.0, None, 1.0), "n1/cpu")


def test_an_agent_joins_and_gets_trials_once_it_is_heard(study: Study, tmp_path: Path) -> None:
    agent = Joining(study)
    answer = agent.hello()
    assert isinstance(answer, Welcome) and answer.node == "n1"
    assert study.nodes.placeable == {}, "nothing is known of its machine yet"
    agent.beat()
    assert study.nodes.placeable == {"n1": FACTS}
    study.nodes.all()["n1"].start(spec(tmp_path))
    study.turn([agent])
    start = agent.said[-1]
    assert start.type == "start" and start.key == "trial-0-1"
    assert isinstance(start.body, ObjectiveRequest)
    assert start.body.verdict_timeout_s > WELCOME.lease_s + 2.0, "it outwaits a broken connection"
    events = agent.say(Said(number=1, key="trial-0-1", message=Started(pid=7, overhead_ms=1.0)))
    events += agent.say(Said(number=1, key="trial-0-1", message=Started(pid=7, overhead_ms=1.0)))
    events += agent.say(Ended(number=2, key="trial-0-1", result=None, evidence=Evidence(exit_code=3)))
    assert [type(event) for event in events] == [ChildMessage, ChildExited], "what is said twice counts once"
    agent.beat(leaving="asked to stop")
    assert study.nodes.placeable == {}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"study": "another"}, "another study"),
        ({"code": {**installation(), "dryfit": "0.0.1"}}, "dryfit 0.0.1 instead of"),
        ({"code": {**installation(), "code": "0" * 16}}, "code 0000000000000000 instead of"),
        ({"epoch": 2, "session": "of an earlier control process"}, "given up"),
    ],
)
def test_who_does_not_belong_here_is_refused_in_words(changed: dict[str, object], why: str, study: Study) -> None:
    answer = Joining(study).hello(**changed)
    assert isinstance(answer, Refusal) and why in answer.why
    assert answer.stale is ("session" in changed)
    assert study.written == []


def test_without_the_token_nobody_is_heard(study: Study) -> None:
    stranger = Joining(study, token=new_token())
    assert stranger.hello() is None
    assert stranger.connection.broken and study.written == []


def test_a_silent_node_gets_nothing_and_is_given_up_later_than_its_agent_gives_up(study: Study, tmp_path: Path) -> None:
    agent = Joining(study)
    agent.hello()
    agent.beat()
    study.nodes.all()["n1"].start(spec(tmp_path))
    study.now[0] += 6.0
    assert study.turn() == [] and study.nodes.placeable == {}
    study.now[0] += WELCOME.lease_s + 2.0 - 6.0
    assert study.turn() == []
    study.now[0] += 6.0
    (ended,) = study.turn()
    assert isinstance(ended, ChildExited) and ended.evidence.server_lost and ended.node == "n1"
    lost = study.written[-1]
    assert isinstance(lost, NodeLost) and lost.trials == 1
    # What comes back is told to end what it has, and joins anew.
    again = Joining(study, identity=agent.identity)
    answer = again.hello(session="session")
    assert isinstance(answer, Refusal) and answer.stale
    anew = Joining(study, identity=agent.identity)
    answer = anew.hello(epoch=2)
    assert isinstance(answer, Welcome) and answer.node == "n1"
    joined = [event for event in study.written if isinstance(event, NodeJoined)]
    assert [event.epoch for event in joined] == [1, 2]
    assert anew.say(Ended(number=1, key="trial-0-1", result=None, evidence=Evidence())) == [], "of the lost epoch"


def test_a_broken_connection_loses_nothing(study: Study, tmp_path: Path) -> None:
    agent = Joining(study)
    agent.hello()
    agent.beat()
    agent.connection.close()
    study.turn()
    study.nodes.all()["n1"].start(spec(tmp_path))
    again = Joining(study, identity=agent.identity)
    again.hello(session="session")
    study.turn([again])
    assert [one.type for one in again.said] == ["welcome", "start"]
    again.beat()
    assert "n1" in study.nodes.placeable


def test_what_leaves_out_a_message_or_talks_nonsense_is_cut_off(study: Study) -> None:
    for message in (Said(number=5, key="k", message=Started(pid=1, overhead_ms=0.0)), WELCOME):
        agent = Joining(study)
        agent.hello()
        agent.say(message)
        assert isinstance(agent.said[-1], Refusal)


def test_a_machine_that_lacks_something_says_what(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    welcome = WELCOME.model_copy(update={"folder": str(tmp_path), "needs": ("/no/such/rows.jsonl",)})
    with pytest.raises(MachineError, match="not the study's folder"):
        AgentChildren(welcome, "0" * 16, print)
    layout.nodes.mkdir()
    publish(layout, ("127.0.0.1", 4), "study-id", WELCOME.session)
    with pytest.raises(MachineError, match=r"/no/such/rows\.jsonl"):
        AgentChildren(welcome, "0" * 16, print)


def test_a_token_is_its_owners_alone(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    token = token_of(layout)
    assert token == token_of(layout) and layout.node_token.stat().st_mode & 0o777 == 0o600
    layout.node_token.chmod(0o644)
    with pytest.raises(FileError, match="others can read it"):
        read_token(layout.node_token)
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    with pytest.raises(FileError, match="no token"):
        read_token(empty)


@pytest.mark.parametrize("text", ["", "host", "host:", ":4", "host:0", "host:70000", "host:four"])
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    assert split_address("[::1]:40") == ("::1", 40)
    with pytest.raises(ConfigError):
        split_address(text)


def test_this_process_has_not_ended_and_another_start_of_its_id_has() -> None:
    own = own_identity()
    assert not has_ended(own)
    assert not has_ended(own.model_copy(update={"boot": "another machine", "pid": 2**22 - 1}))
    if own.boot:
        assert has_ended(own.model_copy(update={"started": own.started + 1}))
        assert has_ended(own.model_copy(update={"pid": 2**30}))
    assert differences(installation(), installation()) == ""


def joined_with(study: Study, folder: Path, *keys: str) -> Joining:
    """An agent that has some trials."""
    agent = Joining(study)
    agent.hello()
    agent.beat()
    for key in keys:
        study.nodes.all()["n1"].start(spec(folder, key))
    study.turn([agent])
    return agent


def test_what_an_agent_hands_over_goes_on_elsewhere_though_its_beat_is_not_heard(study: Study, tmp_path: Path) -> None:
    agent = joined_with(study, tmp_path, "trial-0-1", "trial-1-1")
    agent.connection.close()
    study.turn()
    again = Joining(study, identity=agent.identity)
    again.hello(session="session")
    killed = Evidence(killed_by_us="now", stop_asked=True)
    (handed,) = again.say(Ended(number=1, key="trial-0-1", result=None, evidence=killed, handed_over=True))
    assert isinstance(handed, ChildExited) and handed.evidence.server_lost
    study.nodes.all()["n1"].ask_stop("trial-1-1")
    (asked,) = again.say(Ended(number=2, key="trial-1-1", result=None, evidence=killed, handed_over=True))
    assert isinstance(asked, ChildExited) and asked.evidence == killed, "the study itself had asked for this end"


def test_three_losses_in_a_row_before_a_first_step_set_a_node_aside(study: Study, tmp_path: Path) -> None:
    keys = [f"trial-{number}-1" for number in range(5)]
    agent, said = joined_with(study, tmp_path, *keys), 0
    for key, works in zip(keys, (False, True, False, False, False), strict=True):
        agent.beat()
        assert "n1" in study.nodes.placeable
        if works:
            said += 1
            agent.say(Said(number=said, key=key, message=FirstStep(after_ms=1.0)))
        said += 1
        agent.say(Ended(number=said, key=key, result=None, evidence=Evidence(server_lost=True)))
    agent.beat()
    assert study.nodes.placeable == {}
    assert [note for note in study.notes if "lost 3 in a row" in note]


def test_a_script_waits_as_long_for_its_verdict_as_a_connection_may_be_broken(study: Study, tmp_path: Path) -> None:
    agent, call = joined_with(study, tmp_path), spec(tmp_path).body
    assert isinstance(call, ObjectiveRequest)
    body = ScriptRequest(calling=call, results=None, best_dir=None, checkpoint_every_s=1.0)
    study.nodes.all()["n1"].start(replace(spec(tmp_path), body=body))
    study.turn([agent])
    start = agent.said[-1]
    assert start.type == "start" and isinstance(start.body, ScriptRequest)
    assert start.body.calling.verdict_timeout_s > WELCOME.lease_s + 2.0


@pytest.fixture
def children(tmp_path: Path) -> Iterator[AgentChildren]:
    """The children of an agent in its study's folder."""
    layout = StudyLayout(tmp_path)
    layout.nodes.mkdir()
    publish(layout, ("127.0.0.1", 4), "study-id", WELCOME.session)
    welcome = WELCOME.model_copy(update={"folder": str(tmp_path), "node": "n1", "isolation": Isolation.FRESH})
    with closing(AgentChildren(welcome, "0" * 16, lambda _: None)) as made:
        yield made


@pytest.mark.parametrize("what", ["start", "answer", "stop"])
def test_a_disk_that_cannot_be_written_to_sets_the_node_aside(
    what: str, children: AgentChildren, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for method in ("start", "answer", "ask_stop"):
        monkeypatch.setattr(LocalNode, method, full)
    one = spec(tmp_path / "trials" / "0" / "attempt-1")
    commands: dict[str, Command] = {
        "start": StartChild(
            number=1,
            key=one.key,
            folder=str(one.folder),
            body=one.body,
            limits=one.limits,
            place=one.place,
            planned_bytes=None,
        ),
        "answer": AnswerChild(number=1, key=one.key, verdict=Verdict(n=1, proceed=True)),
        "stop": StopChild(number=1, key=one.key),
    }
    told = list(children.do(commands[what]))
    assert "No space left" in children.trouble
    assert [one.evidence.server_lost for one in told if isinstance(one, Ended)] == [True] * (what == "start")


@pytest.mark.parametrize(
    ("code", "room_bytes", "lost"), [("ENOSPC", 1 << 40, 1), ("ENOSPC", 0, 0), ("EDQUOT", 1 << 40, 0)]
)
def test_a_full_disk_of_one_machine_is_its_trouble_and_not_that_of_the_trial(
    code: str, room_bytes: int, lost: bool, children: AgentChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = ChildFault((f"builtins.OSError[{code}]", "builtins.OSError"), "", "[Errno 28] No space left on device", "")
    event = ChildExited("trial-0-1", None, Evidence(fault=fault, disk_free_bytes=room_bytes, exit_code=1))
    monkeypatch.setattr(LocalNode, "wait", lambda *_: [event])
    (ended,) = children.wait(0.0)
    assert isinstance(ended, Ended)
    assert (ended.evidence.server_lost, bool(children.trouble)) == (lost, lost)


def mutated(line: bytes, draw: random.Random) -> bytes:
    """A line with some of its bytes changed, left out or added."""
    changed = bytearray(line)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed))
        changed[at : at + draw.randint(0, 2)] = bytes(
            draw.choice(b'"{}[]:,0\xff\x00') for _ in range(draw.randint(0, 2))
        )
    return bytes(changed)


class Mad(BaseModel):
    """Whatever an agent says."""

    said: bytes

    def model_dump_json(self, **_: object) -> str:  # type: ignore[override]
        return self.said.decode("latin-1")


def test_ten_thousand_lines_of_an_agent_that_is_out_of_its_mind_are_messages_or_none() -> None:
    draw = random.Random(11)
    good = [
        Hello(identity=own_identity(), epoch=1, code=installation(), facts=FACTS),
        Beat(beat=1, heard=0, devices={}, memory=HostMemory(1, 1)),
        Said(number=1, key="trial-0-1", message=Started(pid=7, overhead_ms=1.0)),
        Ended(number=2, key="trial-0-1", result="{}", evidence=Evidence()),
    ]
    lines = [message.model_dump_json().encode() for message in good]
    heard = 0
    for _ in range(10_000):
        with suppress(ValueError):
            FROM_AGENT.validate_json(mutated(draw.choice(lines), draw))
            heard += 1
    assert 0 < heard < 10_000
    for line in (b"[" * 100_000, b'{"type":' * 10_000, b'{"type":"beat","beat":1e999999}'):
        with pytest.raises(ValueError, match="validation error"):
            FROM_AGENT.validate_json(line)


def test_a_study_hears_its_agent_among_strangers_and_madmen(study: Study, tmp_path: Path) -> None:
    draw, agent = random.Random(12), joined_with(study, tmp_path, "trial-0-1")
    proof = AgentProof(nonce="0" * 64, proof="0" * 64).model_dump_json().encode()
    for turn in range(100):
        with socket.create_connection(study.listener.address) as stranger:
            stranger.sendall(mutated(proof, draw) + b"\n" * draw.randint(0, 2))
            study.nodes.wait(0.0)
        if turn % 10 == 0:
            mad = Joining(study)
            mad.hello()
            mad.connection.send(Mad(said=mutated(b'{"type":"said","number":1}', draw)))  # by one who has the token
            study.turn([mad])
    events = agent.say(Ended(number=1, key="trial-0-1", result=None, evidence=Evidence(exit_code=3)))
    agent.beat()
    assert [type(event) for event in events] == [ChildExited] and "n1" in study.nodes.placeable


def test_strangers_that_say_nothing_are_dropped(study: Study) -> None:
    silent = [socket.create_connection(study.listener.address) for _ in range(70)]
    study.turn()
    agent = Joining(study)
    assert isinstance(agent.hello(), Welcome)
    study.now[0] += 11.0
    study.turn()
    for stranger in silent:
        stranger.settimeout(5.0)
        with suppress(ConnectionError):
            while stranger.recv(4096):
                pass
        stranger.close()


@pytest.mark.parametrize("said", [b"\n", b" ", b"a", b"\n" * 3 + b"{}"])
def test_a_flood_before_the_proof_is_cut_off_at_once(said: bytes, study: Study) -> None:
    with socket.create_connection(study.listener.address) as stranger:
        stranger.setblocking(False)
        with suppress(OSError):
            for _ in range(1000):
                stranger.send(said * (1 << 14))
        for _ in range(3):  # accepted, heard, dropped
            assert study.listener.look() == []
        stranger.setblocking(True)
        with suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    assert len(study.listener.refused()) == 1


def test_connections_that_say_nothing_keep_no_agent_of_another_host_out(study: Study) -> None:
    with ExitStack() as opened:
        stranger = opened.enter_context(
            socket.create_connection(study.listener.address, source_address=("127.0.0.2", 0))
        )
        study.listener.look()
        for _ in range(4):
            for _ in range(50):
                opened.enter_context(socket.create_connection(study.listener.address))
            study.listener.look()
        stranger.settimeout(5.0)
        assert b"nonce" in stranger.recv(4096)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is still there
            stranger.recv(4096)


def test_an_agent_without_a_study_says_once_that_it_waits_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dryfit.processes.agent._TURN_S", 0.0)
    said: list[str] = []
    seconds = itertools.count()
    agent = Agent(own_identity(), lambda: None, str, 600.0, said.append, lambda: float(next(seconds)))
    with pytest.raises(MachineError, match="no control process was found in 600 s") as caught:
        agent.run()
    assert caught.value.hint == "no control process listens"
    assert said == ["no control process listens; waiting for a study, 600 s at most"]


# ---- A killed control process: what its agents still run goes on under the next one, and nothing else does


NEXT = WELCOME.model_copy(update={"session": "new", "isolation": Isolation.FRESH})


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
    terms = Terms(NEXT, "study", grace_s=2.0, here=False, names={identity.agent: "n1"}, left={"n1": left})
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
    script = begun()
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
    welcome = NEXT.model_copy(update={"folder": str(tmp_path), "node": "n1", "session": "old"})
    started = Started(pid=7, overhead_ms=1.0)
    monkeypatch.setattr(LocalNode, "start", lambda *_: None)
    with closing(AgentChildren(welcome, "0" * 16, lambda _: None)) as children:
        children._running = {"trial-0-1": started, "trial-1-1": None}
        assert children.serve(welcome.model_copy(update={"session": "new", "jobs": (Job.SCRIPT,)})) is None
        told = children.serve(welcome.model_copy(update={"session": "new", "heard": 40, "lease_s": 5.0}))
        assert told is not None
        assert list(told) == [Said(number=0, key="trial-0-1", message=started)]
