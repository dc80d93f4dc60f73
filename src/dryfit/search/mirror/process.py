"""The mirror process: follow a ledger and keep an Optuna storage equal to it.

    python -m dryfit.search.mirror.process --ledger PATH --storage journal:PATH|URL|- --study NAME
        --status PATH [--parent PID]

``-`` reads the storage from stdin: every user of a machine sees command lines. A storage ``env:NAME`` is the URL in the
environment variable NAME, which may hold a password; it is read here and nowhere else.
A storage that cannot be written is tried again for as long as the study runs, from the ledger and what the storage has.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna

from dryfit.core.process import die_with_parent
from dryfit.core.text.secrets import redacted, secrets_of, url_secrets
from dryfit.core.text.tail import LineTail
from dryfit.core.wire import write_text_atomic
from dryfit.search.mirror.handle import ENVIRONMENT_PREFIX, LONGEST_PAUSE_S, pause_after, storage_url
from dryfit.search.mirror.writer import MirrorStores, open_storage

_POLL_S = 0.1
_NICENESS = 10
_ERROR_MAX_CHARS = 1_000
_CAUSES_MAX = 3


def error_line(error: BaseException) -> str:
    """Return what an error and its causes say, on one line: Optuna's own errors do not say what the driver's did."""
    links: list[str] = []
    link: BaseException | None = error
    while link is not None and len(links) < _CAUSES_MAX:
        links.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return " ".join("; from ".join(links).split())


class MirrorStatus:
    """The file that says how far the mirror is, and since when its storage cannot be written.

    Args:
        file: Where it is.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reached: dict[str, Any] = {"offset": 0, "pid": os.getpid(), "journal": ""}
        self._failing_since_s: float | None = None
        self._error = ""

    def reached(self, offset: int, journal: str) -> None:
        """Say how many bytes of the ledger are mirrored, and in which journal if in any."""
        self._reached |= {"offset": offset, "journal": journal}
        self._failing_since_s, self._error = None, ""
        write_text_atomic(self._file, json.dumps(self._reached), durable=False)

    def failed(self, text: str, error: str) -> None:
        """Say that the storage cannot be written; the log gets the whole text where the error is a new one."""
        if self._failing_since_s is None:
            self._failing_since_s = time.time()
        if error != self._error:
            print(f"{text}it is tried again, at least every {LONGEST_PAUSE_S:g} s", flush=True)
        self._error = error
        said = {**self._reached, "failing_since_s": self._failing_since_s, "error": error}
        with suppress(OSError):  # the disk may be what fails
            write_text_atomic(self._file, json.dumps(said), durable=False)


class Mirror:
    """Follows one ledger.

    Args:
        ledger: The ledger.
        storage: What is written, as :func:`dryfit.search.mirror.writer.open_storage` takes it.
        study: Name of the study in it.
        status: Where it says how far it is.
    """

    def __init__(self, ledger: Path, *, storage: str, study: str, status: MirrorStatus) -> None:
        self._tail = LineTail(ledger)
        self._where = storage
        self._study = study
        self._status = status
        self._stores: MirrorStores | None = None
        self._journal = ""

    def catch_up(self) -> bool:
        """Mirror all new lines of the ledger. Returns whether there were any."""
        lines = list(self._tail.read())
        if not lines:
            return False
        if self._stores is None:
            storage, self._journal = open_storage(self._where)
            self._stores = MirrorStores(storage, self._study, first_line=lines[0])
        self._stores.add(lines)
        self._status.reached(self._tail.offset, self._journal)
        return True


def follow(
    new_mirror: Callable[[], Mirror], *, ending: Callable[[], bool], failed: Callable[[Exception], None]
) -> bool:
    """Mirror until the end; then once more, so that nothing already written is missing.

    A storage that cannot be written is tried again later and later, and never given up. What was half done is not gone
    on with: a new mirror writes what the storage lacks of the whole ledger.

    Args:
        new_mirror: Makes a mirror that has done nothing yet.
        ending: Whether the study ends.
        failed: Is told of each error.

    Returns:
        Whether all was mirrored in the end.
    """
    mirror, failures = new_mirror(), 0
    while True:
        last = ending()
        pause_s = _POLL_S
        try:
            if mirror.catch_up():
                failures = pause_s = 0
        except Exception as error:  # noqa: BLE001  # drivers have errors of their own; whatever it is may pass
            failed(error)
            if last:
                return False
            mirror, pause_s = new_mirror(), pause_after(failures)
            failures += 1
        if last:
            return True
        until_s = time.monotonic() + pause_s
        while not ending() and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))


def main(argv: list[str] | None = None) -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m dryfit.search.mirror.process", description="Mirror a ledger.")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--study", required=True)
    parser.add_argument("--status", type=Path, required=True)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args(argv)
    stop_asked: list[int] = []
    # A stop in the middle of a write would tear the journal: the signal only sets a mark.
    signal.signal(signal.SIGTERM, lambda number, _: stop_asked.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a batch system's warning may go to every process of a job
    if options.parent is not None:
        die_with_parent(options.parent)
    os.nice(_NICENESS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # this process does nothing else
    storage = sys.stdin.readline().strip() if options.storage == "-" else options.storage
    url = storage_url(storage, os.environ)
    secrets = secrets_of(os.environ)
    if url != storage:
        secrets |= url_secrets(storage.removeprefix(ENVIRONMENT_PREFIX), url)
    status = MirrorStatus(options.status)

    def failed(error: Exception) -> None:  # drivers put the URL into their messages
        whole = redacted("".join(traceback.format_exception(error)), secrets)
        status.failed(whole, redacted(error_line(error), secrets)[:_ERROR_MAX_CHARS])

    done = follow(
        lambda: Mirror(options.ledger, storage=url, study=options.study, status=status),
        ending=lambda: bool(stop_asked) or (options.parent is not None and os.getppid() != options.parent),
        failed=failed,
    )
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
