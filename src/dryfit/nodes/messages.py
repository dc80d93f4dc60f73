"""Messages between an agent and the control process: one JSON object a line, each with a MAC.

Those with a ``number`` are kept by who says them until they are acknowledged (:mod:`dryfit.nodes.outbox`), so that they
survive a broken connection; the others are only of use while the connection lasts.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dryfit.config.schema import Isolation
from dryfit.core.failure import Evidence
from dryfit.core.jobs.child import RequestBody
from dryfit.core.jobs.job import Job
from dryfit.core.wire import Message, Verdict, Wire
from dryfit.nodes.secure_lines import NONCE_CHARS
from dryfit.runtime.children.child_spec import ChildLimits
from dryfit.runtime.machine.gpus import GpuState
from dryfit.runtime.machine.host_memory import HostMemory
from dryfit.runtime.machine.node import NodeFacts

_Hex = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{NONCE_CHARS}}}$")]


class Greeting(Wire):
    """Control's first line, before anything is proved."""

    type: Literal["dryfit-nodes"] = "dryfit-nodes"
    nonce: _Hex


class AgentProof(Wire):
    """The agent's first line."""

    nonce: _Hex
    proof: _Hex


class ControlProof(Wire):
    """Control's answer to it: from then on every line has a MAC."""

    proof: _Hex


class Identity(Wire):
    """An agent and its machine.

    Attributes:
        agent: A name that no other agent has; the same as long as it lives.
        host: What its machine is called.
        boot: What identifies the machine since it was started, and the space of its process ids; empty: not known.
        pid: The agent's process id.
        started: When that process began, in ticks since its machine was started.
    """

    agent: str = Field(pattern=r"^[0-9a-f]{16}$")
    host: str = Field(max_length=255)
    boot: str = Field(max_length=255)
    pid: int = Field(gt=0)
    started: int


class Hello(Wire):
    """The agent's first sealed line.

    Attributes:
        identity: Who it is.
        epoch: Counts from 1; another one after its children were ended.
        session: The session of the control process that its children belong to; empty: it has none.
        running: Those children, by key, the ones included whose end was not acknowledged.
        acknowledged: The last number of its own that was acknowledged.
        heard: The last number that it has heard from that control process.
        study: The study's id, as the agent's folder has it; empty: it has no folder.
        code: What its installation is, by the names of the parts (:func:`dryfit.nodes.installation.installation`).
        facts: What its machine has.
    """

    type: Literal["hello"] = "hello"
    identity: Identity
    epoch: int = Field(ge=1)
    session: str = ""
    running: tuple[str, ...] = ()
    acknowledged: int = 0
    heard: int = 0
    study: str = ""
    code: dict[str, str]
    facts: NodeFacts


class Welcome(Wire):
    """Control's answer: the agent is a node.

    Attributes:
        node: Its name.
        session: Of this control process.
        heard: The last number that control has heard from this agent in this epoch.
        lease_s: How long its children may run without a beat that control has acknowledged.
        marker: The study's, of which the agent makes one of its own.
        folder: The study's folder.
        needs: Files and folders that trials read.
        isolation: How children are made.
        preload: What the fork server imports.
        jobs: The only jobs that children may have.
    """

    type: Literal["welcome"] = "welcome"
    node: str
    session: str
    heard: int
    lease_s: float
    marker: str
    folder: str
    needs: tuple[str, ...]
    isolation: Isolation
    preload: tuple[str, ...]
    jobs: tuple[Job, ...]


class Refusal(Wire):
    """Control's other answer.

    Attributes:
        why: In words.
        stale: The agent's children are not wanted any more: it is to end them, and may come again.
    """

    type: Literal["refusal"] = "refusal"
    why: str
    stale: bool = False


class StartChild(Wire):
    """Start a child (:class:`~dryfit.runtime.children.child_spec.ChildSpec`)."""

    type: Literal["start"] = "start"
    number: int
    key: str
    folder: str
    body: RequestBody
    limits: ChildLimits
    place: str
    planned_bytes: int | None


class AnswerChild(Wire):
    """Answer a child's report."""

    type: Literal["answer"] = "answer"
    number: int
    key: str
    verdict: Verdict


class StopChild(Wire):
    """Ask a child to write a checkpoint and end."""

    type: Literal["stop"] = "stop"
    number: int
    key: str


class KillChild(Wire):
    """Kill a child."""

    type: Literal["kill"] = "kill"
    number: int
    key: str
    why: str


class BeatHeard(Wire):
    """Control has heard a beat of this number, and all that was said up to ``heard``."""

    type: Literal["beat_heard"] = "beat_heard"
    beat: int
    heard: int


class Bye(Wire):
    """The session is over."""

    type: Literal["bye"] = "bye"
    why: str


class Said(Wire):
    """A child's message."""

    type: Literal["said"] = "said"
    number: int
    key: str
    message: Message


class Ended(Wire):
    """A child has ended.

    Attributes:
        result: The text of its ``result.json``.
        handed_over: The agent itself has asked it to stop, so that it goes on elsewhere.
    """

    type: Literal["ended"] = "ended"
    number: int
    key: str
    result: str | None
    evidence: Evidence
    handed_over: bool = False


class Beat(Wire):
    """A sign of life.

    Attributes:
        beat: Counts from 1 on each connection.
        heard: The last number that was heard from control.
        devices: The state of each device, by its name on its node; those not known are left out.
        memory: The host's.
        leaving: Why the agent is to have no more children; empty: it may have more.
    """

    type: Literal["beat"] = "beat"
    beat: int
    heard: int
    devices: dict[str, GpuState]
    memory: HostMemory
    leaving: str = ""


class Left(Wire):
    """The agent ends, and its children have ended."""

    type: Literal["left"] = "left"
    number: int
    why: str


Command = StartChild | AnswerChild | StopChild | KillChild
FromControl = Annotated[
    Welcome | Refusal | StartChild | AnswerChild | StopChild | KillChild | BeatHeard | Bye, Field(discriminator="type")
]
FROM_CONTROL: TypeAdapter[FromControl] = TypeAdapter(FromControl)

News = Said | Ended | Left
FromAgent = Annotated[Hello | Said | Ended | Beat | Left, Field(discriminator="type")]
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(FromAgent)
