"""The machines of a study that listens for agents, and what is known of each."""

import selectors
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dryfit.ledger.events import Event, NodeJoined, NodeLost
from dryfit.ledger.folder import StudyLayout, attempt_key
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import NodeState, SessionState
from dryfit.processes.agent_link import differences, has_ended, installation
from dryfit.processes.attempt import read_messages, read_result
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildMessage, ChildSpec
from dryfit.processes.connection import Connection, Inbox, Outbox, TlsBytes
from dryfit.processes.gpus import GpuState
from dryfit.processes.node import ComputeNode, DeviceFacts, HostMemory, LocalNode, NodeFacts
from dryfit.processes.node_messages import (
    FROM_AGENT,
    AnswerChild,
    Beat,
    BeatHeard,
    Bye,
    Command,
    Ended,
    Hello,
    Identity,
    KillChild,
    Left,
    News,
    Refusal,
    Said,
    Side,
    StartChild,
    StopChild,
    Welcome,
)
from dryfit.settings.devices import node_of
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.training_messages import OwnTrainingRequest, StopReason
from dryfit.settings.wire import FirstStep, JobRequest, Report, Verdict

# Accept agents and read their messages without blocking; the descriptor is readable when there are any.


_SILENT_STRANGER_S = 10.0
_MOST_STRANGERS = 64
_DEAF_S = 1.0
"""How long nobody is let in where no more files may be opened: the socket stays readable, and would keep us busy."""


class Listener:
    """All connections of a control process.

    Args:
        listening: A socket that listens; closed with this.
        token: The study's.
        clock: Seconds of a clock that is never set.
        tls: How it speaks TLS; None: in the plain.
    """

    def __init__(
        self, listening: socket.socket, token: str, clock: Callable[[], float], tls: ssl.SSLContext | None = None
    ) -> None:
        self._listening = listening
        self._token = token
        self._clock = clock
        self._tls = tls
        self._selector = selectors.DefaultSelector()
        self._connections: dict[Connection, selectors.SelectorKey] = {}
        self._strangers: dict[Connection, tuple[float, str]] = {}
        """Since when each is there, and its host."""
        self._refused: deque[str] = deque(maxlen=_MOST_STRANGERS)
        self._deaf_since_s: float | None = None
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port where it listens."""
        host, port, *_ = self._listening.getsockname()
        return host, port

    def fileno(self) -> int:
        """File descriptor to select on for reading; on Linux and macOS a selector has one."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def known(self, connection: Connection) -> None:
        """Keep a connection: whoever is at its other end has said who it is."""
        self._strangers.pop(connection, None)

    def drop(self, connection: Connection) -> None:
        """Close a connection; nothing happens where it is closed already."""
        self._strangers.pop(connection, None)
        if self._connections.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def look(self) -> list[tuple[Connection, bytes]]:
        """Return what was said since the last call, in order for each connection; broken ones stay until dropped."""
        said: list[tuple[Connection, bytes]] = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, Connection):
                connection = key.fileobj
                said += [(connection, line) for line in connection.receive()]
        now_s = self._clock()
        if self._deaf_since_s is not None and now_s - self._deaf_since_s > _DEAF_S:
            self._deaf_since_s = None
            self._selector.register(self._listening, selectors.EVENT_READ)
        for stranger, (since_s, _) in list(self._strangers.items()):
            if stranger.broken or now_s - since_s > _SILENT_STRANGER_S:
                if stranger.is_refused:
                    self._refused.append(stranger.broken)
                self.drop(stranger)
        for connection in self._connections:
            self._watch(connection)
        return said

    def refused(self) -> list[str]:
        """Return why strangers were cut off since the last call: what they said is not what this study's agents say."""
        why = list(self._refused)
        self._refused.clear()
        return why

    def close(self) -> None:
        """Close everything."""
        for connection in list(self._connections):
            self.drop(connection)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(_MOST_STRANGERS):  # the rest is for the next look
            try:
                connected, (host, *_) = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # too many open files: one less may be open soon
                self._selector.unregister(self._listening)
                self._deaf_since_s = self._clock()
                return
            wire = TlsBytes(self._tls) if self._tls is not None else None
            connection = Connection(connected, Side.CONTROL, self._token, wire)
            self._connections[connection] = self._selector.register(connection, selectors.EVENT_READ)
            self._strangers[connection] = (self._clock(), host)
            if len(self._strangers) > _MOST_STRANGERS:  # the oldest of the host that has most
                ((most, _),) = Counter(host for _, host in self._strangers.values()).most_common(1)
                self.drop(next(one for one, (_, host) in self._strangers.items() if host == most))

    def _watch(self, connection: Connection) -> None:
        """Ask for room to write only while something waits for it."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if self._connections[connection].events != wanted:
            self._connections[connection] = self._selector.modify(connection, wanted)


# A machine with an agent, from the control process's side: its requests and its known state.


class NodeStanding(Enum):
    """What a node counts as."""

    JOINED = auto()
    SILENT = auto()
    """Nothing is heard of it now: it gets no trials, and those that it has may go on."""
    LEAVING = auto()
    """It gets no trials; those that it has end."""
    LOST = auto()
    """Its trials have been given up."""


@dataclass(slots=True)
class RemoteNode:
    """A :class:`~dryfit.processes.node.ComputeNode` behind a connection, of one epoch of one agent.

    Attributes:
        name: Its name in the study.
        identity: Its agent.
        epoch: The agent's.
        facts: What its machine has.
        verdict_timeout_s: How long its children wait for a verdict at least: longer than a connection may be broken.
        heard_s: When the agent was heard last, by our clock.
        told_heard_s: That of which others were told.
        standing: What it counts as.
        children: What it was asked to start and has not reported the end of, each with its folder.
        asked_to_stop: Those of them that the study has asked to stop.
        inbox: Which of the agent's messages were heard.
        taken: The last of them that was acted on.
        set_aside: Whether it gets no more trials, because it has lost so many.
        leaving: Why it gets no more trials, as its agent says.
        awaited: Whether it is known of an earlier session alone, which its agent may come back from with its children.
    """

    name: str
    identity: Identity
    epoch: int
    facts: NodeFacts
    verdict_timeout_s: float
    heard_s: float
    told_heard_s: float = 0.0
    standing: NodeStanding = NodeStanding.SILENT
    connection: Connection | None = None
    children: dict[str, Path] = field(default_factory=dict[str, Path])
    asked_to_stop: set[str] = field(default_factory=set[str])
    inbox: Inbox = field(default_factory=Inbox)
    taken: int = 0
    set_aside: bool = False
    leaving: str = ""
    awaited: bool = False
    _outbox: Outbox[Command] = field(default_factory=Outbox[Command])
    _devices: dict[str, GpuState] = field(default_factory=dict[str, GpuState])
    _memory: HostMemory | None = None

    def start(self, spec: ChildSpec) -> None:
        """See :class:`~dryfit.processes.node.ChildControl`; of a lost node, its end is heard next."""
        self.children[spec.key] = spec.folder
        self._say(
            StartChild(
                number=0,
                key=spec.key,
                folder=str(spec.folder.absolute()),
                body=_patient(spec.body, self.verdict_timeout_s),
                limits=spec.limits,
                place=spec.place,
                planned_bytes=spec.planned_bytes,
            )
        )

    def answer(self, key: str, verdict: Verdict) -> None:
        """See :class:`~dryfit.processes.node.ChildControl`."""
        self._say(AnswerChild(number=0, key=key, verdict=verdict))

    def ask_stop(self, key: str) -> None:
        """See :class:`~dryfit.processes.node.ChildControl`."""
        self.asked_to_stop.add(key)
        self._say(StopChild(number=0, key=key))

    def kill(self, key: str, why: str = "now") -> None:
        """See :class:`~dryfit.processes.node.ChildControl`."""
        self._say(KillChild(number=0, key=key, why=why))

    def look(self, device: str) -> GpuState | None:
        """Return the state of a device as the agent has told it last."""
        return self._devices.get(device)

    def host_memory(self, pids: Iterable[int] = ()) -> HostMemory:
        """Return the state of the host's memory, and what its children take, as the agent has told it last."""
        del pids  # the agent tells of all its children
        return self._memory or HostMemory(self.facts.host_bytes, self.facts.host_bytes)

    def take_beat(self, beat: Beat) -> None:
        """Take in what a beat tells."""
        self._outbox.acknowledge(beat.heard)
        self._devices, self._memory = beat.devices, beat.memory
        if self.standing is not NodeStanding.LOST:
            self.standing = NodeStanding.LEAVING if beat.leaving or self.set_aside else NodeStanding.JOINED

    def come_back(self, hello: Hello) -> None:
        """Take in what an agent says that comes back from an earlier session; what is left there is ended."""
        self.awaited, self.identity, self.facts = False, hello.identity, hello.facts
        self.inbox, self.taken = Inbox(hello.acknowledged), hello.acknowledged
        for key in hello.running:
            if key not in self.children:
                self.kill(key)

    def connect(self, connection: Connection, heard: int) -> None:
        """Go on over a new connection, with all that the agent has not heard."""
        self.connection = connection
        self._outbox.acknowledge(heard)
        for number, command in self._outbox.waiting():
            connection.send(command.model_copy(update={"number": number}))

    def tell(self, message: BaseModel) -> None:
        """Say what is of use on this connection only."""
        if self.connection is not None:
            self.connection.send(message)

    def _say(self, command: Command) -> None:
        if self.standing is not NodeStanding.LOST:
            number = self._outbox.put(command)
            self.tell(command.model_copy(update={"number": number}))


def _patient(body: JobRequest[Any], timeout_s: float) -> JobRequest[Any]:
    """Return a request whose child waits for its verdict at least so long."""
    if isinstance(body, OwnTrainingRequest):
        return body.model_copy(update={"calling": _patient(body.calling, timeout_s)})
    waits_s = getattr(body, "verdict_timeout_s", timeout_s)
    return body.model_copy(update={"verdict_timeout_s": max(waits_s, timeout_s)}) if waits_s < timeout_s else body


# The machines of a study that listens for agents: this one, and each that an agent has joined with.


@dataclass(frozen=True, slots=True)
class LeftRunning:
    """What was left on one node.

    Attributes:
        joined: The node, as it has joined last.
        children: The folder of each process, by its key.
    """

    joined: NodeJoined
    children: dict[str, Path] = field(default_factory=dict[str, Path])


def left_running(state: StudyState, layout: StudyLayout) -> Mapping[str, LeftRunning]:
    """Return the attempts that may still run on nodes, by node: those that no session has ended.

    A session that left in order has told its agents to end what they ran, so only those count that were killed since
    the last that did. Where no agent comes back with an attempt, it is lost.

    Args:
        state: The study, its present session included.
        layout: Where it lies.
    """
    killed = list(takewhile(lambda session: session.closed is None, reversed(state.sessions[:-1])))
    left: dict[str, LeftRunning] = {}
    for trial in state.open_trials:
        last = trial.attempts[-1] if trial.attempts else None
        if last is None or last.ended or not any(last.session is session for session in killed):
            continue
        node = _newest(killed, node_of(last.place))
        if node is not None and not node.lost:
            found = left.setdefault(node.joined.node, LeftRunning(node.joined))
            folder = layout.trial(trial.number).attempt(last.number)
            found.children[attempt_key(trial.number, last.number)] = folder
    return left


def awaited_node(left: LeftRunning, verdict_timeout_s: float) -> RemoteNode:
    """Return a node that is silent, and that its agent may come back with."""
    joined = left.joined
    identity = Identity(agent=joined.agent, host=joined.host, boot=joined.boot, pid=joined.pid, started=joined.started)
    specs = dict(zip(joined.devices, joined.specs, strict=False))  # older versions wrote none
    devices = tuple(DeviceFacts(name, spec=specs.get(name)) for name in joined.devices)
    facts = NodeFacts(cores=joined.cores, host_bytes=joined.host_bytes, devices=devices)
    node = RemoteNode(joined.node, identity, joined.epoch, facts, verdict_timeout_s, heard_s=0.0)
    node.children, node.awaited = dict(left.children), True
    return node


def _newest(sessions: list[SessionState], name: str) -> NodeState | None:
    """Return a node as it was in the newest session that it joined; None where it joined none, as this machine."""
    return next((session.nodes[name] for session in sessions if name in session.nodes), None)


_SILENT_S = 5.0
_PATIENCE_S = 5.0
"""What is waited beyond the time after which an agent has ended its children, as it counts."""
_RETURN_S = 20.0
"""How long is waited for the agents of a killed control process, from when this one listens."""
_TELL_S = 1.0
"""How often it is told at most that a node was heard."""
_BYE_S = 2.0
_MOST_LOSSES = 3
"""Losses in a row, none after a first step, from which on a node gets no more trials."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms agents join.

    Attributes:
        welcome: What each is told; its name and what was heard of it are added.
        study: The study's id.
        grace_s: How long a child may take to stop, before its agent kills it.
        here: Whether this machine runs trials too.
        names: The names that agents of earlier sessions had, by agent.
        left: What a killed control process has left running, by the node's name.
    """

    welcome: Welcome
    study: str
    grace_s: float
    here: bool
    names: Mapping[str, str]
    left: Mapping[str, LeftRunning] = field(default_factory=dict[str, LeftRunning])

    @property
    def lost_after_s(self) -> float:
        """Silence after which an agent has ended all its children."""
        return self.welcome.lease_s + self.grace_s + _PATIENCE_S

    @property
    def silent_after_s(self) -> float:
        """Silence after which a node gets no more trials."""
        return min(_SILENT_S, self.welcome.lease_s / 2)


@dataclass(slots=True)
class JoinedNodes:
    """The :class:`~dryfit.processes.node.Nodes` of a study, for the control process's one thread.

    Attributes:
        local: This machine: its children, among them all that belong to no trial.
        listener: Hears the agents; ``local`` is woken by it.
        terms: On what terms agents join.
        write: Appends an event to the ledger.
        note: Tells the user a sentence.
        clock: Seconds of a clock that is never set.
        ended: Whether it is certain that an agent is gone, with its children.
        heard: Called now and then with the name of a node that was heard.
        placeable: What each node has that trials may be placed on now, by name; changes as they come and go.
    """

    local: LocalNode
    listener: Listener
    terms: Terms
    write: Callable[[Event], None]
    note: Callable[[str], None]
    clock: Callable[[], float]
    ended: Callable[[Identity], bool] = has_ended
    heard: Callable[[str], None] = lambda _name: None
    placeable: dict[str, NodeFacts] = field(default_factory=dict[str, NodeFacts])
    _nodes: dict[str, RemoteNode] = field(default_factory=dict[str, RemoteNode])
    _names: dict[str, str] = field(init=False)
    _losses: dict[str, int] = field(default_factory=dict[str, int])
    _working: set[str] = field(default_factory=set[str])
    _strangers_told: set[str] = field(default_factory=set[str])
    _news: deque[ChildEvent] = field(default_factory=deque[ChildEvent])
    _woken: bool = False
    _going_on_taken: bool = False
    _listening_since_s: float | None = None

    def __post_init__(self) -> None:
        self._names = dict(self.terms.names)
        self._going_on_taken = not self.terms.left
        for name, left in self.terms.left.items():
            self._nodes[name] = awaited_node(left, self.terms.lost_after_s + _PATIENCE_S)
        self._take_stock()

    def all(self) -> Mapping[str, ComputeNode]:
        """This machine, and every node that there was in this session; a lost one does nothing any more."""
        return {self.local.name: self.local, **self._nodes}

    def wait(self, timeout_s: float) -> Sequence[ChildEvent]:
        """See :class:`~dryfit.processes.node.Nodes`."""
        deadline_s = self.clock() + timeout_s
        if self._listening_since_s is None:
            self._listening_since_s = self.clock()
        self._tell_heard()
        while True:
            changed = self._hear()
            left_s = deadline_s - self.clock()
            news = [*self._news] if self._going_on_taken else []
            events = [*news, *self.local.wait(0.0 if news or changed else max(0.0, left_s))]
            if news:
                self._news.clear()
            if events or changed or self._woken or left_s <= 0:
                self._woken = False
                return events

    def take_going_on(self) -> Mapping[str, str]:
        """See :class:`~dryfit.processes.node.Nodes`."""
        self._going_on_taken = True
        return {key: name for name, left in self.terms.left.items() for key in left.children}

    def wake(self) -> None:
        """See :class:`~dryfit.processes.node.Nodes`."""
        self._woken = True
        self.local.wake()

    def close(self, why: str) -> None:
        """Tell all agents that the session is over, for a moment at most."""
        until_s = self.clock() + _BYE_S
        open_nodes = [node for node in self._nodes.values() if node.connection is not None]
        for node in open_nodes:
            node.tell(Bye(why=why))
        while self.clock() < until_s and any(node.connection.wants_to_write for node in open_nodes if node.connection):
            self.local.wait(0.01)
            self.listener.look()

    def _tell_heard(self) -> None:
        """Acknowledge nothing before it was acted on: what :meth:`wait` has returned was, when it is called again."""
        for node in self._nodes.values() if self._going_on_taken else ():
            node.taken = node.inbox.last

    def _hear(self) -> bool:
        """Take in all that agents have said; return whether trials may be placed otherwise than before."""
        before = dict(self.placeable)
        refused: set[Connection] = set()
        for connection, line in self.listener.look():
            if connection not in refused and not self._takes(connection, line):
                refused.add(connection)
        for why in self.listener.refused():
            if why not in self._strangers_told:
                self._strangers_told.add(why)
                self.note(f"who wanted to join was cut off: {why}")
        for node in list(self._nodes.values()):
            self._examine(node)
        self._take_stock()
        return before != self.placeable

    def _takes(self, connection: Connection, line: bytes) -> bool:
        """Take in a line; False where the connection is of no use after it."""
        try:
            message = FROM_AGENT.validate_json(line)
            node = next((one for one in self._nodes.values() if one.connection is connection), None)
            if isinstance(message, Hello):
                self._admit(connection, message)
            elif node is not None:
                self._take(node, message)
        except ValueError as error:  # one of ValidationError is, too: it speaks otherwise, or leaves something out
            kind = "what it says is none of this version's messages" if isinstance(error, ValidationError) else error
            connection.send(Refusal(why=str(kind)))
            connection.broken = str(kind)
            return False
        return True

    def _admit(self, connection: Connection, hello: Hello) -> None:
        """Answer an agent that wants to join, or to go on."""
        identity, node = hello.identity, self._node_of(hello.identity.agent)
        why = self._objection(hello)
        if why:
            if identity.agent not in self._strangers_told:
                self._strangers_told.add(identity.agent)
                self.note(f"an agent on {identity.host} may not join: {why}")
            connection.send(Refusal(why=why))
            return
        if node is not None and hello.epoch > node.epoch and node.standing is not NodeStanding.LOST:
            self._lose(node, "its agent had no answer for too long, and has ended its children")
        goes_on = node is not None and node.standing is not NodeStanding.LOST and hello.epoch == node.epoch
        of_old = hello.session not in ("", self.terms.welcome.session) or (
            node is not None and hello.epoch <= node.epoch
        )
        if not goes_on and (of_old or hello.session):
            connection.send(Refusal(why="its trials have been given up meanwhile", stale=True))
            return
        if node is None or not goes_on:
            node = self._join(hello)
        elif node.connection is not None:
            self.listener.drop(node.connection)
        if node.awaited:
            self._come_back(node, hello)
        self.listener.known(connection)
        node.heard_s = self.clock()
        connection.send(self.terms.welcome.model_copy(update={"node": node.name, "heard": node.inbox.last}))
        node.connect(connection, hello.heard if hello.session == self.terms.welcome.session else 0)

    def _objection(self, hello: Hello) -> str:
        """Return why an agent may not join; empty if it may."""
        if hello.study not in ("", self.terms.study):
            return "its folder is that of another study"
        return differences(installation(), hello.code)

    def _node_of(self, agent: str) -> RemoteNode | None:
        return next((node for node in self._nodes.values() if node.identity.agent == agent), None)

    def _join(self, hello: Hello) -> RemoteNode:
        agent = hello.identity.agent
        name = self._names.setdefault(agent, next(self._free_names()))
        timeout_s = self.terms.lost_after_s + _PATIENCE_S
        node = RemoteNode(name, hello.identity, hello.epoch, hello.facts, timeout_s, self.clock())
        node.set_aside = self._losses.get(agent, 0) >= _MOST_LOSSES
        self._nodes[name] = node
        self._write_joined(node, hello)
        return node

    def _come_back(self, node: RemoteNode, hello: Hello) -> None:
        """Go on with what an agent still runs for an earlier session; what it does not have was lost."""
        node.come_back(hello)
        self._write_joined(node, hello)
        self._give_up(node, node.children.keys() - set(hello.running))
        self.note(f"node {node.name} has come back from an earlier session, with {len(node.children)} trial(s)")

    def _write_joined(self, node: RemoteNode, hello: Hello) -> None:
        self.write(
            NodeJoined(
                node=node.name,
                agent=hello.identity.agent,
                epoch=hello.epoch,
                host=hello.identity.host,
                pid=hello.identity.pid,
                boot=hello.identity.boot,
                started=hello.identity.started,
                cores=hello.facts.cores,
                host_bytes=hello.facts.host_bytes,
                devices=tuple(device.name for device in hello.facts.devices),
                specs=tuple(device.spec for device in hello.facts.devices),
            )
        )

    def _free_names(self) -> Iterator[str]:
        taken, number = set(self._names.values()), 1
        while True:
            if f"n{number}" not in taken:
                yield f"n{number}"
            number += 1

    def _take(self, node: RemoteNode, message: Beat | News) -> None:
        """Take in what an agent says of a node that counts.

        Raises:
            ValueError: Something before it is missing.
        """
        node.heard_s = self.clock()
        if isinstance(message, Beat):
            if message.leaving and message.leaving != node.leaving:
                node.leaving = message.leaving
                self.note(f"node {node.name} gets no more trials: {message.leaving}")
            node.take_beat(message)
            node.tell(BeatHeard(beat=message.beat, heard=node.taken))
            return
        if not node.inbox.is_new(message.number):
            return
        match message:
            case Said() if message.key in node.children:
                self._news.append(ChildMessage(message.key, message.message, node.name))
                if isinstance(message.message, FirstStep | Report):
                    self._working.add(message.key)
            case Ended() if message.key in node.children:
                self._news.append(_end(node, message))
                lost = message.evidence.server_lost or not message.evidence.started
                self._count_loss(node, {message.key}, lost=lost and message.result is None)
                node.asked_to_stop.discard(message.key)
                del node.children[message.key]
            case Left():
                node.tell(BeatHeard(beat=0, heard=message.number))
                self._lose(node, message.why)
            case _:
                pass

    def _examine(self, node: RemoteNode) -> None:
        """Judge a node by its silence."""
        if node.standing is NodeStanding.LOST:
            self._give_up(node, list(node.children))
            return
        since_s = node.heard_s if self._listening_since_s is None else max(node.heard_s, self._listening_since_s)
        silent_s = self.clock() - since_s
        if node.heard_s >= node.told_heard_s + _TELL_S:
            node.told_heard_s = node.heard_s
            self.heard(node.name)
        if node.connection is not None and node.connection.broken:
            self.listener.drop(node.connection)
            node.connection = None
        if node.connection is None or silent_s > self.terms.silent_after_s:
            node.standing = NodeStanding.SILENT
        if node.connection is None and self.ended(node.identity):
            self._lose(node, "its agent was ended")
        elif node.awaited and silent_s > min(_RETURN_S, self.terms.lost_after_s):
            self._lose(node, "its agent has not come back from an earlier session")
        elif silent_s > self.terms.lost_after_s:
            self._lose(node, f"nothing was heard of it for {silent_s:.0f} s")

    def _lose(self, node: RemoteNode, why: str) -> None:
        node.standing = NodeStanding.LOST
        if node.connection is not None:
            self.listener.drop(node.connection)
            node.connection = None
        self.write(NodeLost(node=node.name, epoch=node.epoch, why=why, trials=len(node.children)))
        self._count_loss(node, set(node.children), lost=bool(node.children))
        self._give_up(node, list(node.children))

    def _count_loss(self, node: RemoteNode, keys: set[str], *, lost: bool) -> None:
        """Count an end of trials on a node; too many losses in a row without a first step set it aside."""
        agent, worked = node.identity.agent, bool(keys & self._working)
        self._working -= keys
        if not keys:
            return
        self._losses[agent] = self._losses.get(agent, 0) + 1 if lost and not worked else 0
        if self._losses[agent] == _MOST_LOSSES:
            self.note(f"node {node.name} gets no more trials: it lost {_MOST_LOSSES} in a row before their first step")
        node.set_aside = self._losses[agent] >= _MOST_LOSSES

    def _give_up(self, node: RemoteNode, keys: Collection[str]) -> None:
        """Report the end of children that a node has lost; what they left in the study's folder counts."""
        for key in keys:
            folder = node.children[key]
            result = read_result(folder)
            if result is not None:
                reports = [one for one in read_messages(folder) if isinstance(one, Report)]
                self._news.extend(ChildMessage(key, report, node.name) for report in reports)
            self._news.append(ChildExited(key, *_unless_stopped(result, Evidence(server_lost=True)), node.name))
            del node.children[key]

    def _take_stock(self) -> None:
        here = {self.local.name: self.local.facts} if self.terms.here else {}
        self.placeable.clear()
        self.placeable |= here
        self.placeable |= {
            name: node.facts for name, node in self._nodes.items() if node.standing is NodeStanding.JOINED
        }


def _end(node: RemoteNode, ended: Ended) -> ChildExited:
    """Return the end of a child; one that its node, or an earlier session, has stopped goes on elsewhere."""
    result = ChildResult.from_json(ended.result.encode()) if ended.result is not None else None
    evidence = ended.evidence
    if (ended.handed_over or evidence.stop_asked) and ended.key not in node.asked_to_stop:
        result, evidence = _unless_stopped(result, Evidence(server_lost=True) if result is None else evidence)
    return ChildExited(ended.key, result, evidence, node.name)


def _unless_stopped(result: ChildResult | None, evidence: Evidence) -> tuple[ChildResult | None, Evidence]:
    """Return a result and its evidence; of a child that its own agent asked to stop, as of one stopped from outside."""
    trained = training_of(result)
    if trained is None or trained.stopped_by is not StopReason.REQUEST:
        return result, evidence
    return ChildResult(trained.model_copy(update={"stopped_by": StopReason.SIGTERM})), evidence
