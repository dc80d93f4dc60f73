"""The connection between an agent and the control process: handshake, encryption, what is unacknowledged."""

import hashlib
import hmac
import os
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.node_messages import (
    MOST_GREETING_BYTES,
    MOST_LINE_BYTES,
    AgentProof,
    ControlProof,
    Greeting,
    Handshake,
    LineCutter,
    LineError,
    SealedLines,
    Side,
    new_token,
)
from dryfit.settings.errors import FileError, MachineError

# Sent messages that the other side has not acknowledged yet, in order. Pure.


T = TypeVar("T")


class Outbox(Generic[T]):
    """Numbered messages, from 1, that outlive a connection: a new one begins with those not acknowledged."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, T]] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def acknowledged(self) -> int:
        """The last number that was acknowledged; 0: none was."""
        return self._last - len(self._kept)

    def put(self, message: T) -> int:
        """Keep a message; return its number."""
        self._last += 1
        self._kept.append((self._last, message))
        return self._last

    def acknowledge(self, number: int) -> None:
        """Forget the messages up to a number, which the other side has taken in."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def waiting(self) -> Iterator[tuple[int, T]]:
        """Yield what is not acknowledged, oldest first, with its numbers."""
        return iter(tuple(self._kept))


class Inbox:
    """Which messages of the other side have been taken in: each counts once, however often it is sent."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def is_new(self, number: int) -> bool:
        """Take in a message's number; False where it was taken in before.

        Raises:
            ValueError: A message before it is missing.
        """
        if number > self.last + 1:
            raise ValueError(f"message {number} comes after message {self.last}")
        if number <= self.last:
            return False
        self.last = number
        return True


# The transport of a connection: plain bytes, or TLS with the study's own certificate.
#
# The control process makes that certificate once. Agents know it by its fingerprint, from the study's folder or from
# their user, and take no other: no authority has signed it, and the name and the dates in it say nothing. Token and
# MACs (:mod:`dryfit.processes.node_messages`) are the same beneath TLS as without. Nothing here reads or writes a
# socket.


_TLS_READ_BYTES: Final = 1 << 16
_TLS_RECORDS: Final = range(0x14, 0x18)
"""What the first byte of a record of TLS may be (RFC 8446, 5.1); a line in the plain begins with none of them."""
_ALERT: Final = bytes((0x15, 3, 3, 0, 2, 2, 70))
"""A fatal alert, protocol_version: whoever speaks in the plain sees by its first byte that TLS is spoken here."""
_OTHER_CERTIFICATE: Final = b"other certificate"
_CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----"


class PlainBytes:
    """Bytes as they are.

    Args:
        greets: Whether this side says something at once, so that one with TLS sees at once that this has none.
    """

    def __init__(self, *, greets: bool) -> None:
        self._unsent = bytearray(b"\n" if greets else b"")
        self._seen = False

    def put(self, data: bytes) -> None:
        """Take what is to be said."""
        self._unsent += data

    def to_send(self) -> bytes:
        """Return what the socket is to be given now."""
        data = bytes(self._unsent)
        self._unsent.clear()
        return data

    def heard(self, data: bytes) -> bytes:
        """Return what was said by bytes of the socket.

        Raises:
            LineError: They are none of this kind.
        """
        if data and not self._seen and data[0] in _TLS_RECORDS:
            raise LineError(
                "the other side speaks TLS, this one does not (nodes.tls of the study, --fingerprint of agents)"
            )
        self._seen = self._seen or bool(data)
        return data


class TlsBytes:
    """TLS 1.3.

    Args:
        context: Of :func:`control_context` or :func:`agent_context`.
        fingerprint: Of the only certificate that the other side may have; None: this is the side that has one.
    """

    def __init__(self, context: ssl.SSLContext, fingerprint: str | None = None) -> None:
        self._fingerprint = fingerprint
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=fingerprint is None)
        self._waiting = bytearray()
        self._shaken = self._seen = False
        self._shake()

    def put(self, data: bytes) -> None:
        """Take what is to be said."""
        if self._shaken:
            self._tls.write(data)
        else:
            self._waiting += data

    def to_send(self) -> bytes:
        """Return what the socket is to be given now."""
        return self._out.read()

    def heard(self, data: bytes) -> bytes:
        """Return what was said by bytes of the socket.

        Raises:
            LineError: They are none of this kind.
        """
        if data and not self._seen and data[0] not in _TLS_RECORDS:
            if self._fingerprint is None:
                self._out.write(_ALERT)
            raise LineError("the other side does not speak TLS, this one does (nodes.tls of the study)")
        self._seen = self._seen or bool(data)
        self._in.write(data)
        said = bytearray()
        try:
            if not self._shaken:
                self._shake()
            while self._shaken and (part := self._tls.read(_TLS_READ_BYTES)):
                said += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise LineError(f"the other side breaks TLS ({error.reason or type(error).__name__})") from error
        if said.startswith(_OTHER_CERTIFICATE):
            raise LineError("the other side knows another certificate than this study's (--fingerprint)")
        return bytes(said)

    def _shake(self) -> None:
        """Go on with the handshake of TLS; after it nothing is said to whoever has another certificate.

        Raises:
            LineError: The other side has another certificate.
            ssl.SSLError: What it says is no TLS.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._shaken = True
        if self._fingerprint is not None:
            found = fingerprint_of(self._tls.getpeercert(binary_form=True) or b"")
            if not hmac.compare_digest(found, self._fingerprint):
                self._tls.write(_OTHER_CERTIFICATE)
                raise LineError(f"the certificate there has the fingerprint {found}, not {self._fingerprint}")
        if self._waiting:
            self._tls.write(self._waiting)
            self._waiting.clear()


WireBytes: TypeAlias = PlainBytes | TlsBytes
"""What lies between the lines of a connection and its socket."""


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (DER), in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def agent_context() -> ssl.SSLContext:
    """Return how agents speak TLS: :class:`TlsBytes` looks at the certificate, by its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def control_context(layout: StudyLayout) -> tuple[ssl.SSLContext, str]:
    """Return how a study's control process speaks TLS, and its certificate's fingerprint; made where there is none.

    Raises:
        FileError: Others than its owner can read the file, or it holds no key and certificate.
        MachineError: One must be made, and what makes them is not installed.
    """
    path = layout.node_certificate
    doing = f"reading the certificate of a study's nodes, {path}"
    if not path.exists():
        _write_privately(path, _new_certificate())
    if (mode := path.stat().st_mode) & 0o077:
        raise FileError(doing, f"others can read its key (mode {mode & 0o777:o})", "mode 600", f"chmod 600 {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no connection is ever taken up again
    try:
        context.load_cert_chain(path)
        text = path.read_text(encoding="ascii")
        return context, fingerprint_of(ssl.PEM_cert_to_DER_cert(text[text.index(_CERTIFICATE) :]))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        hint = f"remove {path}: another one is made, with another fingerprint"
        raise FileError(doing, str(error), "a key and its certificate, in PEM", hint) from error


def _write_privately(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)


def _new_certificate() -> bytes:
    """Return a new key (P-256) and a certificate signed with it, in PEM.

    Raises:
        MachineError: cryptography is not installed.
    """
    try:
        x509: Any = import_module("cryptography.x509")
        ec: Any = import_module("cryptography.hazmat.primitives.asymmetric.ec")
        hashes: Any = import_module("cryptography.hazmat.primitives.hashes")
        forms: Any = import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        doing, hint = "making the certificate that nodes.tls needs", "pip install 'dryfit[tls]'"
        raise MachineError(doing, str(error), "the package cryptography, on this machine alone", hint) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "dryfit")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        # "No well-defined expiration date" (RFC 5280, 4.1.2.5): it is known by its fingerprint, as long as that is.
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    pem = forms.Encoding.PEM
    return key.private_bytes(pem, forms.PrivateFormat.PKCS8, forms.NoEncryption()) + certificate.public_bytes(pem)


# One connection between an agent and the control process: the handshake, then sealed lines; nothing ever blocks.


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
