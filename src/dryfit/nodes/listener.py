"""Accept agents and read their messages without blocking; the descriptor is readable when there are any."""

import selectors
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable

from dryfit.nodes.connection import Connection
from dryfit.nodes.encryption import TlsBytes
from dryfit.nodes.secure_lines import Side

_SILENT_STRANGER_S = 10.0
_MOST_STRANGERS = 64
_DEAF_S = 1.0
"""How long nobody is let in where no more files may be opened: the socket stays readable, and would keep us busy."""


class Listener:
    """All connections of a control process.

    Args:
        listening: A socket that listens; closed with this.
        token: The study's.
        clock: Seconds of a clock that is never set.
        tls: How it speaks TLS; None: in the plain.
    """

    def __init__(
        self, listening: socket.socket, token: str, clock: Callable[[], float], tls: ssl.SSLContext | None = None
    ) -> None:
        self._listening = listening
        self._token = token
        self._clock = clock
        self._tls = tls
        self._selector = selectors.DefaultSelector()
        self._connections: dict[Connection, selectors.SelectorKey] = {}
        self._strangers: dict[Connection, tuple[float, str]] = {}
        """Since when each is there, and its host."""
        self._refused: deque[str] = deque(maxlen=_MOST_STRANGERS)
        self._deaf_since_s: float | None = None
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port where it listens."""
        host, port, *_ = self._listening.getsockname()
        return host, port

    def fileno(self) -> int:
        """File descriptor to select on for reading; on Linux and macOS a selector has one."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def known(self, connection: Connection) -> None:
        """Keep a connection: whoever is at its other end has said who it is."""
        self._strangers.pop(connection, None)

    def drop(self, connection: Connection) -> None:
        """Close a connection; nothing happens where it is closed already."""
        self._strangers.pop(connection, None)
        if self._connections.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def look(self) -> list[tuple[Connection, bytes]]:
        """Return what was said since the last call, in order for each connection; broken ones stay until dropped."""
        said: list[tuple[Connection, bytes]] = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, Connection):
                connection = key.fileobj
                said += [(connection, line) for line in connection.receive()]
        now_s = self._clock()
        if self._deaf_since_s is not None and now_s - self._deaf_since_s > _DEAF_S:
            self._deaf_since_s = None
            self._selector.register(self._listening, selectors.EVENT_READ)
        for stranger, (since_s, _) in list(self._strangers.items()):
            if stranger.broken or now_s - since_s > _SILENT_STRANGER_S:
                if stranger.is_refused:
                    self._refused.append(stranger.broken)
                self.drop(stranger)
        for connection in self._connections:
            self._watch(connection)
        return said

    def refused(self) -> list[str]:
        """Return why strangers were cut off since the last call: what they said is not what this study's agents say."""
        why = list(self._refused)
        self._refused.clear()
        return why

    def close(self) -> None:
        """Close everything."""
        for connection in list(self._connections):
            self.drop(connection)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(_MOST_STRANGERS):  # the rest is for the next look
            try:
                connected, (host, *_) = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # too many open files: one less may be open soon
                self._selector.unregister(self._listening)
                self._deaf_since_s = self._clock()
                return
            wire = TlsBytes(self._tls) if self._tls is not None else None
            connection = Connection(connected, Side.CONTROL, self._token, wire)
            self._connections[connection] = self._selector.register(connection, selectors.EVENT_READ)
            self._strangers[connection] = (self._clock(), host)
            if len(self._strangers) > _MOST_STRANGERS:  # the oldest of the host that has most
                ((most, _),) = Counter(host for _, host in self._strangers.values()).most_common(1)
                self.drop(next(one for one, (_, host) in self._strangers.items() if host == most))

    def _watch(self, connection: Connection) -> None:
        """Ask for room to write only while something waits for it."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if self._connections[connection].events != wanted:
            self._connections[connection] = self._selector.modify(connection, wanted)
