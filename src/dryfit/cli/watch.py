"""``dryfit status --watch``: show a study that another process runs, on stdout, until it ends."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from dryfit.cli.output import console, show
from dryfit.reporting.document import document_of
from dryfit.reporting.watch import (
    StudyFollower,
    StudyPanel,
    Watched,
    watched_lines,
)

_EVERY_S = 1.0
_LINES_EVERY_S = 30.0


def watch(
    follower: StudyFollower,
    *,
    out: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show a study until no process runs it any more. Ctrl-C ends the watching, not the study.

    Args:
        follower: Reads the study.
        out: Where to draw the panel; by default stdout, as lines where that is no terminal.
        sleep: Waits for a number of seconds.
        clock: Monotonic time in seconds.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    out = out or console()
    readings = follower.readings(_EVERY_S, sleep)
    if out.is_terminal and not out.is_dumb_terminal:
        with Live(_panel(next(readings)), console=out, auto_refresh=False) as live:
            for watched in readings:
                live.update(_panel(watched), refresh=True)
        return
    last_s: float | None = None
    for watched in readings:
        if last_s is None or not watched.running or clock() - last_s >= _LINES_EVERY_S:
            last_s = clock()
            show(document_of(watched))
            sys.stdout.flush()


def _panel(watched: Watched) -> StudyPanel:
    return StudyPanel(watched.study, footer=watched_lines(watched))
