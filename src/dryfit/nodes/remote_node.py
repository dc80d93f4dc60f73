"""A machine with an agent, from the control process's side: its requests and its known state."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dryfit.core.jobs.job import JobRequest
from dryfit.core.jobs.train import ScriptRequest, TrainerRequest
from dryfit.core.wire import Verdict
from dryfit.nodes.connection import Connection
from dryfit.nodes.messages import AnswerChild, Beat, Command, Hello, Identity, KillChild, StartChild, StopChild
from dryfit.nodes.outbox import Inbox, Outbox
from dryfit.runtime.children.child_spec import ChildSpec
from dryfit.runtime.machine.gpus import GpuState
from dryfit.runtime.machine.host_memory import HostMemory
from dryfit.runtime.machine.node import NodeFacts


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
    """A :class:`~dryfit.runtime.machine.node.ComputeNode` behind a connection, of one epoch of one agent.

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
        """See :class:`~dryfit.runtime.machine.node.ChildControl`; of a lost node, its end is heard next."""
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
        """See :class:`~dryfit.runtime.machine.node.ChildControl`."""
        self._say(AnswerChild(number=0, key=key, verdict=verdict))

    def ask_stop(self, key: str) -> None:
        """See :class:`~dryfit.runtime.machine.node.ChildControl`."""
        self.asked_to_stop.add(key)
        self._say(StopChild(number=0, key=key))

    def kill(self, key: str, why: str = "now") -> None:
        """See :class:`~dryfit.runtime.machine.node.ChildControl`."""
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
    if isinstance(body, TrainerRequest | ScriptRequest):
        return body.model_copy(update={"calling": _patient(body.calling, timeout_s)})
    waits_s = getattr(body, "verdict_timeout_s", timeout_s)
    return body.model_copy(update={"verdict_timeout_s": max(waits_s, timeout_s)}) if waits_s < timeout_s else body
