"""The transport of a connection: plain bytes, or TLS with the study's own certificate.

The control process makes that certificate once. Agents know it by its fingerprint, from the study's folder or from
their user, and take no other: no authority has signed it, and the name and the dates in it say nothing. Token and MACs
(:mod:`dryfit.nodes.secure_lines`) are the same beneath TLS as without. Nothing here reads or writes a socket.
"""

import hashlib
import hmac
import os
import ssl
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

from dryfit.core.errors import FileError, MachineError
from dryfit.nodes.secure_lines import LineError
from dryfit.store.layout import StudyLayout

_READ_BYTES: Final = 1 << 16
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
            while self._shaken and (part := self._tls.read(_READ_BYTES)):
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
