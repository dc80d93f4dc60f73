"""An agent's way to the control process: what is installed, the rendezvous, the line."""

import functools
import os
import platform
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.connection import Connection, Inbox, Outbox, TlsBytes, agent_context
from dryfit.processes.node_messages import FROM_CONTROL, FromControl, Identity, Left, News, Side, new_token
from dryfit.settings.errors import ConfigError, FileError, MachineError
from dryfit.settings.files import read_bounded, write_model
from dryfit.settings.version import PACKAGE_FOLDER, VERSION, code_fingerprint
from dryfit.settings.wire import Wire

# Versions and code hash of an installation, and the identity of machine and process; compared when an agent joins.


_LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate", "numpy")
"""What decides, beside our own code, the values that a trial comes to."""


@functools.cache
def installation() -> dict[str, str]:
    """Return what trials' values depend on of an installation, by name: versions, and a hash of our own code."""
    code, python = code_fingerprint(PACKAGE_FOLDER)[:16], ".".join(map(str, sys.version_info[:2]))
    found = {"dryfit": VERSION, "code": code, "python": python}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return in words how an agent's installation differs from that of the control process; empty: it does not."""
    names = [name for name in (*here, *(set(there) - set(here))) if here.get(name) != there.get(name)]
    return ", ".join(f"{name} {there.get(name, 'unknown')} instead of {here.get(name, 'unknown')}" for name in names)


def own_identity() -> Identity:
    """Return who this process is, as an agent."""
    return Identity(
        agent=secrets.token_hex(8),
        host=platform.node(),
        boot=_boot(),
        pid=os.getpid(),
        started=_state_and_start(os.getpid())[1],
    )


def has_ended(agent: Identity) -> bool:
    """Whether it is certain that an agent's process is gone, and its children with it: it was one of this machine."""
    if not agent.boot or agent.boot != _boot():
        return False
    state, started = _state_and_start(agent.pid)
    return state in ("", "Z", "X") or started != agent.started


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state and when it began, as Linux tells (proc_pid_stat(5)); empty and 0 without it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _boot() -> str:
    """Return what identifies this machine since its start, and the space in which process ids count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


# How an agent finds the control process: an address and a token in the study's folder, readable by its owner alone.


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


# An agent's connection to the control process: connects, and sends lost messages again after a break.


_DIAL_S = 1.0
_DIAL_EVERY_S = 0.5
_SHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address of the control process, with the shared secret and the expected certificate.

    Attributes:
        token: The shared secret.
        fingerprint: Of the certificate that control must have; empty: it speaks in the plain.
    """

    host: str
    port: int
    token: str
    fingerprint: str = ""


@dataclass(slots=True)
class AgentLink:
    """The connection to the control process, or the tries to get one.

    Attributes:
        find: Returns where the control process is; None: nobody knows now.
        watch: Called with the descriptor of each new connection.
        forget: Called with it before it is closed.
        clock: Seconds of a clock that is never set.
        trouble: Why there is no connection; empty where there is one.
        refused: Why the last connection was ended that another than control, or one who speaks otherwise, was at.
        inbox: What was heard of control, of what is numbered.
        outbox: What it is told, of what is numbered, and has not acknowledged.
    """

    find: Callable[[], Meeting | None]
    watch: Callable[[int], None]
    forget: Callable[[int], None]
    clock: Callable[[], float]
    trouble: str = ""
    refused: str = ""
    inbox: Inbox = field(default_factory=Inbox)
    outbox: Outbox[News] = field(default_factory=Outbox[News])
    _connection: Connection | None = None
    _since_s: float = 0.0
    _dialled_s: float | None = None
    _welcomed: bool = False

    @property
    def is_proved(self) -> bool:
        """Whether the other side is the control process."""
        return self._connection is not None and self._connection.is_proved

    def forget_all(self) -> None:
        """Begin again: nothing was heard, and nothing is to be said."""
        self.hang_up("")
        self.inbox, self.outbox = Inbox(), Outbox()

    def dial(self) -> None:
        """Connect, if it is time to and there is no connection."""
        now_s = self.clock()
        if self._connection is not None:
            if not self._welcomed and now_s - self._since_s > _SHAKE_S:
                self.hang_up("the other side does not answer")
            return
        if self._dialled_s is not None and now_s - self._dialled_s < _DIAL_EVERY_S:
            return
        self._dialled_s = now_s
        target = self.find()
        if target is None:
            self.trouble = "no control process listens"
            return
        try:
            connected = socket.create_connection((target.host, target.port), timeout=_DIAL_S)
        except (OSError, UnicodeError) as error:  # of a host's name that is none
            self.trouble = f"{target.host}, port {target.port}: {error}"
            return
        wire = TlsBytes(agent_context(), target.fingerprint) if target.fingerprint else None
        self._connection = Connection(connected, Side.AGENT, target.token, wire)
        self._since_s, self._welcomed = now_s, False
        self.watch(self._connection.fileno())

    def go_on(self, heard: int) -> None:
        """Take in that control has let us join, and tell it all that it has not heard."""
        self._welcomed, self.trouble = True, ""
        self.outbox.acknowledge(heard)
        for number, news in self.outbox.waiting():
            self.say(news.model_copy(update={"number": number}))

    def hear(self) -> list[FromControl]:
        """Return what control has said since the last call.

        Raises:
            ValueError: It says what this version does not understand.
        """
        if self._connection is None:
            return []
        said = [FROM_CONTROL.validate_json(line) for line in self._connection.receive()]
        if self._connection.broken:
            self.refused = self._connection.broken if self._connection.is_refused else self.refused
            self.hang_up(self._connection.broken)
        return said

    def tell(self, news: News) -> None:
        """Say what must be heard, now or over a later connection."""
        number = self.outbox.put(news)
        if self._welcomed:
            self.say(news.model_copy(update={"number": number}))

    def say(self, message: BaseModel) -> None:
        """Say what is of use on this connection only."""
        if self._connection is not None:
            self._connection.send(message)

    def unheard(self) -> frozenset[str]:
        """Return the keys of the children of which control has not acknowledged all that it was told."""
        return frozenset(news.key for _, news in self.outbox.waiting() if not isinstance(news, Left))

    def fileno(self) -> int | None:
        """File descriptor to select on; None: there is none."""
        return self._connection.fileno() if self._connection is not None else None

    def hang_up(self, why: str) -> None:
        """End the connection, if there is one."""
        self.trouble = why
        if self._connection is not None:
            self.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None
        self._welcomed = False
