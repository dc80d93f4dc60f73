"""What every process that follows a ledger does: it tries for ever, says how far it is, and ends when it is told."""

import argparse
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from dryfit.core.process import die_with_parent
from dryfit.core.text.secrets import redacted
from dryfit.core.wire import write_text_atomic
from dryfit.search.mirror.follower import LONGEST_PAUSE_S, pause_after

_POLL_S = 0.1
_NICENESS = 10
_ERROR_MAX_CHARS = 1_000
_CAUSES_MAX = 3


class Follower(Protocol):
    """Follows one ledger."""

    def catch_up(self) -> bool:
        """Write all new lines of the ledger. Returns whether there were any."""
        ...


def error_line(error: BaseException) -> str:
    """Return what an error and its causes say, on one line: Optuna's own errors do not say what the driver's did."""
    links: list[str] = []
    link: BaseException | None = error
    while link is not None and len(links) < _CAUSES_MAX:
        links.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return " ".join("; from ".join(links).split())


class FollowerStatus:
    """The file that says how far a follower is, and since when its target cannot be written.

    Args:
        file: Where it is.
        secrets: What is told by its name only, in the file and in the log.
    """

    def __init__(self, file: Path, secrets: Mapping[str, str] | None = None) -> None:
        self._file = file
        self._secrets = secrets or {}
        self._reached: dict[str, Any] = {"offset": 0, "pid": os.getpid()}
        self._failing_since_s: float | None = None
        self._error = ""

    def reached(self, offset: int, **facts: str) -> None:
        """Say how many bytes of the ledger are written, and further facts."""
        self._reached |= {"offset": offset, **facts}
        self._failing_since_s, self._error = None, ""
        write_text_atomic(self._file, json.dumps(self._reached), durable=False)

    def failed(self, error: Exception) -> None:
        """Say that the target cannot be written; the log gets the traceback where the error is a new one."""
        if self._failing_since_s is None:
            self._failing_since_s = time.time()
        line = redacted(error_line(error), self._secrets)[:_ERROR_MAX_CHARS]  # drivers put URLs into their messages
        if line != self._error:
            whole = redacted("".join(traceback.format_exception(error)), self._secrets)
            print(f"{whole}it is tried again, at least every {LONGEST_PAUSE_S:g} s", flush=True)
        self._error = line
        said = {**self._reached, "failing_since_s": self._failing_since_s, "error": line}
        with suppress(OSError):  # the disk may be what fails
            write_text_atomic(self._file, json.dumps(said), durable=False)


def follow(
    new_follower: Callable[[], Follower], *, ending: Callable[[], bool], failed: Callable[[Exception], None]
) -> bool:
    """Follow until the end; then once more, so that nothing already written is missing.

    A target that cannot be written is tried again later and later, and never given up. What was half done is not gone
    on with: a new follower writes what the target lacks of the whole ledger.

    Args:
        new_follower: Makes a follower that has done nothing yet.
        ending: Whether the study ends.
        failed: Is told of each error.

    Returns:
        Whether all was written in the end.
    """
    follower, failures = new_follower(), 0
    while True:
        last = ending()
        pause_s = _POLL_S
        try:
            if follower.catch_up():
                failures = pause_s = 0
        except Exception as error:  # noqa: BLE001  # drivers have errors of their own; whatever it is may pass
            failed(error)
            if last:
                return False
            follower, pause_s = new_follower(), pause_after(failures)
            failures += 1
        if last:
            return True
        until_s = time.monotonic() + pause_s
        while not ending() and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))


def follower_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every follower's process has."""
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--status", type=Path, required=True)
    parser.add_argument("--parent", type=int)


def follower_ending(parent: int | None) -> Callable[[], bool]:
    """Make this process a follower's: niced, it ends with its parent, and a signal to end only sets a mark.

    A stop in the middle of a write would tear what is written.

    Args:
        parent: The process that it ends with; None: none.

    Returns:
        Whether it is to end.
    """
    stop_asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_asked.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a batch system's warning may go to every process of a job
    if parent is not None:
        die_with_parent(parent)
    os.nice(_NICENESS)
    return lambda: bool(stop_asked) or (parent is not None and os.getppid() != parent)
