"""Studies with agents on this machine: real processes, and a proxy between them that can fall silent."""

import json
import selectors
import socket
import subprocess
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dryfit.ledger.events import Event, NodeJoined
from study_runs import RANDOM, objective_study, start, wait_for

NODES = '\n[execution]\ndevice = "cpu"\n[nodes]\nlocal = false\nlease_s = {lease_s}\nslots = 2\ntls = {tls}\n'


def write_study(
    folder: Path, *, trials: int, parallel: int, lease_s: float | None = None, search: str = RANDOM, tls: bool = False
) -> Path:
    """A study of the function ``stepwise``; with a lease it listens for agents, and runs nothing itself."""
    folder.mkdir(parents=True)
    text = objective_study(
        "stepwise",
        study=f"trials = {trials}\nseed = 5",
        search=search,
        runtime=f"parallel = {parallel}\nstop_grace_s = 2\nhang_timeout_s = 60",
    )
    if lease_s is None:
        text += '\n[execution]\ndevice = "cpu"\n'
    else:
        text += NODES.format(lease_s=lease_s, tls=str(tls).lower())
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder


def start_agent(*words: str | Path) -> subprocess.Popen[str]:
    """Start an agent that waits for its study."""
    return start("agent", *words, "--wait", "60")


@contextmanager
def agents_of(folder: Path, count: int) -> Generator[list[subprocess.Popen[str]], None, None]:
    """Agents of a study, which end with this block at the latest."""
    with ExitStack() as stack:
        agents = [start_agent(folder) for _ in range(count)]
        for agent in agents:
            stack.callback(end, agent)
        yield agents


def end(process: subprocess.Popen[str]) -> str:
    """End a process, wait for it, and return what it said on stderr."""
    with suppress(ProcessLookupError):
        process.kill()
    try:
        return process.communicate(timeout=60)[1]
    except ValueError:  # somebody has read it to its end
        return ""


def joined(events: list[Event]) -> list[str]:
    """The nodes that have joined so far."""
    return [event.node for event in events if isinstance(event, NodeJoined)]


def address_of(folder: Path) -> tuple[str, int]:
    """Where a study listens, once it does."""
    file = folder / "nodes" / "address.json"
    wait_for(file.exists)
    said = json.loads(file.read_text(encoding="utf-8"))
    return said["host"], said["port"]


class Proxy:
    """Passes bytes on between agents and a study, and loses them where it is told to.

    Attributes:
        port: Where it listens.
        loses_up: Whether it loses what agents say.
        loses_down: Whether it loses what they are told.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.loses_up = self.loses_down = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._pass_on(key)

    def _accept(self) -> None:
        near, _ = self._listening.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:  # the study does not run now
            near.close()
            return
        self._selector.register(near, selectors.EVENT_READ, (far, "up"))
        self._selector.register(far, selectors.EVENT_READ, (near, "down"))

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        source, (target, way) = key.fileobj, key.data
        assert isinstance(source, socket.socket)
        try:
            data = source.recv(1 << 16)
            lost = self.loses_up if way == "up" else self.loses_down
            if data and not lost:
                target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (source, target):
                with suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()
