"""Lines that only the other side of one connection can have written: a proof of the token, then a MAC on each. Pure.

Both sides have a token. Each sends a nonce and proves the token over both nonces, with its role in the proof, so that
neither can be answered with its own words. From token and nonces come two keys, one for each direction. A line is
``MAC, space, payload``; the MAC (HMAC-SHA256, RFC 2104) is over the number of the line and the payload, so a line that
was changed, left out, repeated, moved, or taken from another connection or direction is none.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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
