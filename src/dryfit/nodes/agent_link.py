"""An agent's connection to the control process: connects, and sends lost messages again after a break."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from dryfit.nodes.connection import Connection
from dryfit.nodes.encryption import TlsBytes, agent_context
from dryfit.nodes.messages import FROM_CONTROL, FromControl, Left, News
from dryfit.nodes.outbox import Inbox, Outbox
from dryfit.nodes.secure_lines import Side

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
