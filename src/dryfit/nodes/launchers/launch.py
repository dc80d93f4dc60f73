"""What starts the agents of a session, as ``nodes.launch`` says: somebody by hand, Slurm, or Ray."""

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from dryfit.config.nodes_table import NodesSettings
from dryfit.core.errors import MachineError
from dryfit.nodes.launchers.ray_cluster import Ray
from dryfit.nodes.launchers.slurm import Slurm
from dryfit.store.layout import StudyLayout

_LOOK_EVERY_S = 30.0
_END_S = 5.0
_POLL_S = 0.2
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737): a UDP socket connected to it sends nothing, and knows its own address."""


class Launcher(Protocol):
    """Starts agents, and ends what has not become one."""

    def start(self) -> str:
        """Begin; return what was done, in words."""
        ...

    def text(self) -> str:
        """Return what :meth:`start` does, as a person would type it."""
        ...

    def trouble(self) -> str:
        """Return why no agents are to be expected any more; empty where some are."""
        ...

    def waits(self) -> bool:
        """Whether any of its agents still has to start or to end."""
        ...

    def cancel(self, *, pending: bool) -> None:
        """End what has not begun, or everything."""
        ...

    def forget(self) -> None:
        """It is over."""
        ...


def launcher_of(wish: NodesSettings, layout: StudyLayout) -> Launcher | None:
    """Return what starts the agents of a study; None: somebody does by hand."""
    kind, _, rest = wish.launch.partition(":")
    match kind:
        case "slurm":
            return Slurm(layout, int(rest), wish.sbatch_options)
        case "ray":
            return Ray(layout, rest or "auto")
        case _:
            return None


def launch_text(wish: NodesSettings, layout: StudyLayout) -> str:
    """Return what is done to start the agents of a study, as a person would type it; empty: nothing is."""
    launcher = launcher_of(wish, layout)
    return launcher.text() if launcher is not None else ""


def listen_host(wish: NodesSettings) -> str:
    """Return the address to listen on: that of the study file, or where others start the agents one they can reach."""
    if wish.host is not None:
        return wish.host
    return _LOOPBACK if wish.launch == "listen" else _own_address()


def _own_address() -> str:
    """Return this machine's address for others: what its name stands for, or else that of its way out."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = _LOOPBACK
    if not named.startswith("127."):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        try:
            way_out.connect(_ELSEWHERE)
            return way_out.getsockname()[0]
        except OSError:  # no network: agents can only be on this machine
            return _LOOPBACK


@contextmanager
def launched(wish: NodesSettings, layout: StudyLayout, note: Callable[[str], None]) -> Generator[None, None, None]:
    """Have agents started, within this block; at its end those that have not begun are cancelled, the others end.

    Args:
        wish: The table ``[nodes]``.
        layout: The study's folder, where the address lies already.
        note: Tells the user a sentence; from a thread too.

    Raises:
        DryfitError: They cannot be started.
    """
    launcher = launcher_of(wish, layout)
    if launcher is None:
        yield
        return
    note(launcher.start())
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(launcher, over, note), name="launched agents", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        try:
            _end(launcher)
        except MachineError as error:
            note(f"agents that wait to be started could not be cancelled: {error}")


def _watch(launcher: Launcher, over: threading.Event, note: Callable[[str], None]) -> None:
    """Say once when no agents are to be expected any more: the study would wait for them."""
    told = ""
    while not told and not over.wait(_LOOK_EVERY_S):
        try:
            told = launcher.trouble()
        except MachineError:  # it may answer the next time
            continue
        if told and not over.is_set():
            note(told)


def _end(launcher: Launcher) -> None:
    """Cancel what has not begun; the others have been told that the session is over, and end by themselves."""
    launcher.cancel(pending=True)
    until_s = time.monotonic() + _END_S
    while launcher.waits():
        if time.monotonic() > until_s:
            launcher.cancel(pending=False)
            break
        time.sleep(_POLL_S)
    launcher.forget()
