"""One connection between an agent and the control process: the handshake, then sealed lines; nothing ever blocks."""

import socket
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dryfit.nodes.encryption import PlainBytes, WireBytes
from dryfit.nodes.messages import AgentProof, ControlProof, Greeting
from dryfit.nodes.secure_lines import (
    MOST_GREETING_BYTES,
    MOST_LINE_BYTES,
    Handshake,
    LineCutter,
    LineError,
    SealedLines,
    Side,
    new_token,
)

_READ_BYTES = 1 << 16
_READS_AT_ONCE = 64
_MOST_UNSENT_BYTES = 1 << 27
_MOST_UNPROVED_BYTES = 1 << 14
"""What an agent may send before it has proved that it has the token: a TLS handshake takes about 2 KiB."""
_MOST_UNPROVED_LINES = 4

ModelT = TypeVar("ModelT", bound=BaseModel)


class Connection:
    """A connection from its handshake to its end.

    Args:
        connected: The socket, which is made non-blocking and is closed with this.
        role: Our side.
        token: The shared secret.
        wire: What lines are turned into; None: they are sent as they are.

    Attributes:
        broken: Why nothing more can be said or heard; empty: something can.
        is_refused: Whether that is so because of what the other side has said.
    """

    def __init__(self, connected: socket.socket, role: Side, token: str, wire: WireBytes | None = None) -> None:
        self._socket = connected
        self._role = role
        self._token = token
        self._wire = wire if wire is not None else PlainBytes(greets=role is Side.AGENT)
        self._nonce = new_token()
        self._handshake: Handshake | None = None
        self._lines = LineCutter(MOST_GREETING_BYTES)
        self._unproved_bytes = self._unproved_lines = 0
        self._unsent = bytearray()
        self._sealer: SealedLines | None = None
        self._opener: SealedLines | None = None
        self.broken = ""
        self.is_refused = False
        connected.setblocking(False)
        with suppress(OSError):  # a socket pair, in a test, has no such option
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if role is Side.CONTROL:
            self._say(Greeting(nonce=self._nonce))
        self.flush()

    def fileno(self) -> int:
        """File descriptor to select on."""
        return self._socket.fileno()

    @property
    def is_proved(self) -> bool:
        """Whether the other side has proved that it has the token."""
        return self._opener is not None

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be taken by the socket."""
        return bool(self._unsent) and not self.broken

    def send(self, message: BaseModel) -> None:
        """Send a message; nothing happens where the connection is broken.

        Raises:
            LineError: It is too long.
        """
        assert self._sealer is not None  # nothing is said to one who has proved nothing
        if not self.broken:
            self._wire.put(self._sealer.seal(message.model_dump_json().encode()))
            self.flush()

    def flush(self) -> None:
        """Give the socket what it takes now."""
        self._unsent += self._wire.to_send()
        try:
            while self._unsent and not self.broken:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                self.broken = "the other side does not read"
        except OSError as error:
            self.broken = str(error)

    def receive(self) -> list[bytes]:
        """Return what the other side has said since the last call, the handshake aside; see :attr:`broken`."""
        self.flush()
        heard: list[bytes] = []
        for _ in range(_READS_AT_ONCE if self._is_trusted else 1):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.broken = self.broken or str(error)
                break
            if not data:
                self.broken = self.broken or "the other side has closed the connection"
                break
            heard.append(data)
        said: list[bytes] = []
        try:
            for data in heard:
                self._count(len(data), lines=0)
                self._lines.feed(self._wire.heard(data))
            while (line := self._lines.next_line()) is not None:
                if self._opener is None:
                    self._count(0, lines=1)
                    self._shake(line)
                else:
                    said.append(self._opener.open(line))
        except LineError as error:
            self.flush()  # an alert, where this side speaks TLS
            self.broken, self.is_refused = str(error), True
            self._unsent.clear()
        else:
            self.flush()
        return said

    @property
    def _is_trusted(self) -> bool:
        """Whether the other side may cost what it wants: agents go to their control process by themselves."""
        return self.is_proved or self._role is Side.AGENT

    def _count(self, size: int, lines: int) -> None:
        """Count what was heard before the proof.

        Raises:
            LineError: It is more than an agent says.
        """
        if self._is_trusted:
            return
        self._unproved_bytes += size
        self._unproved_lines += lines
        if self._unproved_bytes > _MOST_UNPROVED_BYTES or self._unproved_lines > _MOST_UNPROVED_LINES:
            raise LineError("the other side says too much before it has proved that it has this study's token")

    def close(self) -> None:
        """Close the socket."""
        self.broken = self.broken or "closed"
        self._socket.close()

    def _say(self, message: BaseModel) -> None:
        self._wire.put(message.model_dump_json().encode() + b"\n")
        self.flush()

    def _shake(self, line: bytes) -> None:
        """Take in a line of the handshake, and answer it.

        Raises:
            LineError: The other side does not have the token, or speaks otherwise.
        """
        if self._role is Side.CONTROL:
            if not line:  # of an agent that speaks in the plain, at once
                return
            said = _read(AgentProof, line)
            handshake = Handshake(self._token, self._nonce, said.nonce)
            _demand(handshake, Side.AGENT, said.proof)
            self._say(ControlProof(proof=handshake.proof(Side.CONTROL)))
        elif self._handshake is None:
            handshake = self._handshake = Handshake(self._token, _read(Greeting, line).nonce, self._nonce)
            self._say(AgentProof(nonce=self._nonce, proof=handshake.proof(Side.AGENT)))
            return
        else:
            handshake = self._handshake
            _demand(handshake, Side.CONTROL, _read(ControlProof, line).proof)
        self._lines.most_bytes = MOST_LINE_BYTES
        self._sealer = SealedLines(handshake.key(self._role))
        self._opener = SealedLines(handshake.key(self._role.other))


def _demand(handshake: Handshake, role: Side, proof: str) -> None:
    if not handshake.is_proof(role, proof):
        raise LineError("the other side does not have this study's token")


def _read(cls: type[ModelT], line: bytes) -> ModelT:
    try:
        return cls.model_validate_json(line)
    except ValidationError as error:
        raise LineError("the other side is no dryfit, or one of another version") from error
