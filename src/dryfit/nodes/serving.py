"""Serve a study from this process as its agent, until its session is over or a signal asks it to end."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dryfit.core.clock import since_boot_s
from dryfit.core.errors import ConfigError
from dryfit.nodes.agent import Agent
from dryfit.nodes.agent_link import Meeting
from dryfit.nodes.installation import own_identity
from dryfit.nodes.rendezvous import read_address, read_fingerprint, read_token, split_address
from dryfit.store.layout import StudyLayout


def serve(
    layout: StudyLayout | None,
    join: str | None,
    token_file: Path | None,
    wait_s: float,
    on_note: Callable[[str], None],
    fingerprint: str | None = None,
) -> str:
    """Run trials of a study on this machine; see :func:`dryfit.api.agent`."""
    by_address = join is not None and token_file is not None
    if (layout is None) is not by_address or (join is None) is not (token_file is None):
        raise ConfigError("starting an agent", "not one of both", "the study's folder, or --join with --token-file")
    if join is None and fingerprint is not None:
        raise ConfigError("starting an agent", "--fingerprint without --join", "neither: the study's folder has both")
    if join is not None and token_file is not None:
        pinned = read_fingerprint(fingerprint) if fingerprint is not None else ""
        there = Meeting(*split_address(join), read_token(token_file), pinned)
        find, study = (lambda: there), str
    else:
        assert layout is not None
        folder = layout

        def find() -> Meeting | None:
            address = read_address(folder)
            if address is None:
                return None
            return Meeting(address.host, address.port, read_token(folder.node_token), address.fingerprint)

        def study() -> str:
            address = read_address(folder)
            return address.study if address is not None else ""

    made = Agent(own_identity(), find, study, wait_s, on_note, since_boot_s)
    with _stopped_by_signals(made):
        return made.run()


@contextmanager
def _stopped_by_signals(made: Agent) -> Generator[None, None, None]:
    """Let signals ask an agent to end, and the second of them at once, within this block."""

    def stop(number: int, _frame: FrameType | None) -> None:
        # SIGUSR2 may come twice for one warning, from Slurm and from the script of its job: it never means "at once".
        made.stop_now = made.stop_now or (made.stop_asked and number != signal.SIGUSR2)
        made.stop_asked = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
