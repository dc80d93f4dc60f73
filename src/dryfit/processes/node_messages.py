"""What an agent and the control process send each other: sealed lines, one JSON object each."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from dryfit.processes.child_spec import ChildLimits
from dryfit.processes.gpus import GpuState
from dryfit.processes.node import HostMemory, NodeFacts
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import RequestBody
from dryfit.settings.study_file import Isolation
from dryfit.settings.wire import Job, Message, Verdict, Wire

# Lines that only the other side of one connection can have written: a proof of the token, then a MAC on each. Pure.
#
# Both sides have a token. Each sends a nonce and proves the token over both nonces, with its role in the proof, so
# that neither can be answered with its own words. From token and nonces come two keys, one for each direction. A line
# is ``MAC, space, payload``; the MAC (HMAC-SHA256, RFC 2104) is over the number of the line and the payload, so a
# line that was changed, left out, repeated, moved, or taken from another connection or direction is none.


NONCE_CHARS: Final = 64
MOST_LINE_BYTES: Final = 1 << 24
"""Of a line after the handshake: what a child leaves as its result is one."""
MOST_GREETING_BYTES: Final = 1 << 10
"""Of a line before the other side has proved anything."""
_MAC_CHARS: Final = 64
_LABEL: Final = b"dryfit nodes 1"


class LineError(ValueError):
    """A line that the other side of this connection has not written, or that is too long."""


class Side(StrEnum):
    """The two sides of a connection."""

    AGENT = "agent"
    CONTROL = "control"

    @property
    def other(self) -> "Side":
        """The other side."""
        return Side.CONTROL if self is Side.AGENT else Side.AGENT


def new_token() -> str:
    """Return a new token, or a new nonce: 32 random bytes in hexadecimal."""
    return secrets.token_hex(NONCE_CHARS // 2)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What both sides know once each has sent its nonce.

    Attributes:
        token: The shared secret.
        control_nonce: Of the control process.
        agent_nonce: Of the agent.
    """

    token: str
    control_nonce: str
    agent_nonce: str

    def proof(self, role: Side) -> str:
        """Return what proves that a side has the token."""
        return self._derived(b"proof", role).hexdigest()

    def is_proof(self, role: Side, proof: str) -> bool:
        """Whether a side has proved that it has the token."""
        return hmac.compare_digest(self.proof(role).encode(), proof.encode(errors="replace"))

    def key(self, role: Side) -> bytes:
        """Return the key of what a side writes."""
        return self._derived(b"key", role).digest()

    def _derived(self, purpose: bytes, role: Side) -> hmac.HMAC:
        said = "\n".join((role, self.control_nonce, self.agent_nonce)).encode(errors="replace")
        return hmac.new(self.token.encode(errors="replace"), b"\n".join((_LABEL, purpose, said)), hashlib.sha256)


class SealedLines:
    """Makes or reads the lines of one direction.

    Args:
        key: Of that direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the next line, with its end.

        Raises:
            LineError: The payload is too long, or has an end of a line in it.
        """
        if len(payload) > MOST_LINE_BYTES - _MAC_CHARS - 1 or b"\n" in payload:
            raise LineError(f"{len(payload)} bytes cannot be sent as one line")
        line = _mac(self._key, self._count, payload) + b" " + payload + b"\n"
        self._count += 1
        return line

    def open(self, line: bytes) -> bytes:
        """Return what the next line says.

        Args:
            line: The line without its end.

        Raises:
            LineError: It is not the next line that the other side has written.
        """
        payload = line[_MAC_CHARS + 1 :]
        if not hmac.compare_digest(line[: _MAC_CHARS + 1], _mac(self._key, self._count, payload) + b" "):
            raise LineError(f"line {self._count} is not from the other side, or not the next one")
        self._count += 1
        return payload


class LineCutter:
    """Cuts a stream of bytes into lines of a bounded length.

    Args:
        most_bytes: The most that a line may have, and so the most that is kept of one that has no end yet.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rest = bytearray()
        self._looked_bytes = 0

    def feed(self, data: bytes) -> None:
        """Add bytes."""
        self._rest += data

    def next_line(self) -> bytes | None:
        """Take the next complete line, without its end; None where there is none yet.

        Raises:
            LineError: It is too long.
        """
        end = self._rest.find(b"\n", self._looked_bytes)
        if (len(self._rest) if end < 0 else end) > self.most_bytes:
            raise LineError(f"a line has more than {self.most_bytes} bytes")
        if end < 0:
            self._looked_bytes = len(self._rest)
            return None
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        self._looked_bytes = 0
        return line


def _mac(key: bytes, count: int, payload: bytes) -> bytes:
    return hmac.new(key, count.to_bytes(8, "big") + payload, hashlib.sha256).hexdigest().encode()


# Messages between an agent and the control process: one JSON object a line, each with a MAC.
#
# Those with a ``number`` are kept by who says them until they are acknowledged (:mod:`dryfit.processes.connection`),
# so that they survive a broken connection; the others are only of use while the connection lasts.


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
        code: What its installation is, by the names of the parts (:func:`dryfit.processes.agent_link.installation`).
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
    """Start a child (:class:`~dryfit.processes.child_spec.ChildSpec`)."""

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
