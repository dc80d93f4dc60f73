"""How an agent finds the control process: an address and a token in the study's folder, readable by its owner alone."""

import os
import re
import socket
from pathlib import Path

from pydantic import Field, ValidationError

from dryfit.core.errors import ConfigError, FileError, MachineError
from dryfit.core.regular_files import read_bounded
from dryfit.core.wire import Wire, write_model
from dryfit.nodes.secure_lines import new_token
from dryfit.store.layout import StudyLayout

_MOST_BYTES = 1 << 12
_EVERYWHERE = ("", "0.0.0.0", "::")


class Address(Wire):
    """Where a control process listens, and for which session of which study.

    Attributes:
        fingerprint: The SHA-256 of its certificate; empty: it speaks in the plain.
    """

    host: str
    port: int = Field(ge=1, le=65535)
    study: str
    session: str
    fingerprint: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        MachineError: It cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        allowed = "an address of this machine, and a free port (0: any)"
        raise MachineError(f"listening for nodes on {host}, port {port}", str(error), allowed) from error


def publish(layout: StudyLayout, listens: tuple[str, int], study: str, session: str, fingerprint: str = "") -> Address:
    """Write down where the control process listens, for agents that have the study's folder; return it."""
    host, port = listens
    named = socket.gethostname() if host in _EVERYWHERE else host
    address = Address(host=named, port=port, study=study, session=session, fingerprint=fingerprint)
    write_model(layout.node_address, address, durable=False)
    return address


def read_address(layout: StudyLayout) -> Address | None:
    """Return where the control process of a study listens; None where none does, or it cannot be read now."""
    try:
        return Address.model_validate_json(read_bounded(layout.node_address, _MOST_BYTES))
    except (OSError, FileError, ValidationError):
        return None


def token_of(layout: StudyLayout) -> str:
    """Return a study's token; made where there is none.

    Raises:
        FileError: Others than its owner can read it, or it is none.
    """
    layout.nodes.mkdir(mode=0o700, exist_ok=True)
    try:
        fd = os.open(layout.node_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(layout.node_token)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(f"{new_token()}\n")
    return read_token(layout.node_token)


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        FileError: Others than its owner can read it, it is none, or it cannot be read.
    """
    doing = f"reading the token of a study's nodes, {path}"
    try:
        text = read_bounded(path, _MOST_BYTES).decode("ascii", errors="replace").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise FileError(doing, str(error), "the file nodes/token of the study's folder, or a copy of it") from error
    if mode & 0o077:
        raise FileError(doing, f"others can read it (mode {mode & 0o777:o})", "mode 600", f"chmod 600 {path}")
    if len(text) < 32 or not text.isalnum():
        raise FileError(doing, "it holds no token", "the file nodes/token of the study's folder, or a copy of it")
    return text


def read_fingerprint(text: str) -> str:
    """Return the fingerprint of a certificate; colons and capitals are as good as none.

    Raises:
        ConfigError: It is none.
    """
    found = text.replace(":", "").lower()
    if re.fullmatch(r"[0-9a-f]{64}", found) is None:
        allowed = "64 hexadecimal digits, the SHA-256 that the study says when it begins to listen"
        raise ConfigError("joining a study", f"--fingerprint is {text!r}", allowed)
    return found


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        ConfigError: It is no such text.
    """
    host, sign, port = text.rpartition(":")
    if not sign or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError("joining a study", f"--join is {text!r}", "HOST:PORT, such as 10.0.0.5:40123")
    return host.removeprefix("[").removesuffix("]"), int(port)
