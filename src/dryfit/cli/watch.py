"""``dryfit status --watch``: a study that another process runs, on stdout, until it ends."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from dryfit.cli.output import console
from dryfit.cli.panel import WatchPanel, study_progress_line, trial_progress_line
from dryfit.reporting.terminal.watch import StudyFollower, Watched, watched_lines

_EVERY_S = 1.0
_LINES_EVERY_S = 30.0


def watch(
    follower: StudyFollower,
    *,
    out: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show a study until nobody runs it; it is not disturbed. Ctrl-C ends the watching, not the study.

    Args:
        follower: Of the study.
        out: Where to draw; None: stdout, as lines where that is no terminal.
        sleep: Waits so many seconds.
        clock: Seconds of any clock.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    out = out or console()
    if out.is_terminal and not out.is_dumb_terminal:
        _draw(follower, out, sleep)
    else:
        _tell(follower, sleep, clock)


def _draw(follower: StudyFollower, out: Console, sleep: Callable[[float], None]) -> None:
    watched = follower.look()
    with Live(WatchPanel(watched), console=out, auto_refresh=False) as live:
        while watched.running:
            sleep(_EVERY_S)
            watched = follower.look()
            live.update(WatchPanel(watched), refresh=True)


def _tell(follower: StudyFollower, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    told_s: float | None = None
    while True:
        watched = follower.look()
        if told_s is None or not watched.running or clock() - told_s >= _LINES_EVERY_S:
            told_s = clock()
            sys.stdout.write("".join(f"{line}\n" for line in _lines(watched)))
            sys.stdout.flush()
        if not watched.running:
            return
        sleep(_EVERY_S)


def _lines(watched: Watched) -> list[str]:
    view = watched.study
    return [
        study_progress_line(view),
        *(trial_progress_line(trial, view.goals) for trial in view.trials),
        *watched_lines(watched),
    ]
