"""The mirror process: follow a ledger and keep an Optuna storage equal to it.

    python -m dryfit.search.mirror.process --ledger PATH --storage journal:PATH|URL|- --study NAME
        --status PATH [--parent PID]

``-`` reads the storage from stdin: every user of a machine sees command lines. A storage ``env:NAME`` is the URL in the
environment variable NAME, which may hold a password; it is read here and nowhere else.
Any error ends it; a new process starts from the ledger and what the storage has.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import optuna

from dryfit.core.process import die_with_parent
from dryfit.core.text.secrets import redacted, secrets_of, url_secrets
from dryfit.core.text.tail import LineTail
from dryfit.core.wire import write_text_atomic
from dryfit.search.mirror.handle import storage_url
from dryfit.search.mirror.model import MirrorModel, parse_event
from dryfit.search.mirror.writer import MirrorStores, open_storage

_POLL_S = 0.1
_NICENESS = 10


class Mirror:
    """Follows one ledger."""

    def __init__(self, ledger: Path, *, storage: str, study: str, status: Path) -> None:
        self._tail = LineTail(ledger)
        self._where = storage
        self._study = study
        self._status = status
        self._model = MirrorModel()
        self._stores: MirrorStores | None = None
        self._journal = ""

    def catch_up(self) -> bool:
        """Mirror all new lines of the ledger. Returns whether there were any."""
        lines = list(self._tail.read())
        if not lines:
            return False
        if self._stores is None:
            self._stores = self._open(lines[0])
        events = [event for line in lines if (event := parse_event(line)) is not None]
        self._stores.update(self._model, [trial for event in events if (trial := self._model.apply(event)) is not None])
        status = {"offset": self._tail.offset, "pid": os.getpid(), "journal": self._journal}
        write_text_atomic(self._status, json.dumps(status), durable=False)
        return True

    def _open(self, first_line: bytes) -> MirrorStores:
        storage, self._journal = open_storage(self._where)
        ledger_id = hashlib.sha256(first_line).hexdigest()[:16]
        return MirrorStores(storage, self._study, ledger_id=ledger_id)


def follow(mirror: Mirror, *, parent_pid: int | None, stopped: Callable[[], bool]) -> None:
    """Mirror until asked to stop or orphaned; then once more, so that nothing already written is missing."""
    while not stopped() and (parent_pid is None or os.getppid() == parent_pid):
        if not mirror.catch_up():
            time.sleep(_POLL_S)
    mirror.catch_up()


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
    mirror = Mirror(
        options.ledger,
        storage=url,
        study=options.study,
        status=options.status,
    )
    try:
        follow(mirror, parent_pid=options.parent, stopped=lambda: bool(stop_asked))
    except Exception as error:  # noqa: BLE001  # the outermost frame: drivers put the URL into their messages
        secrets = secrets_of(os.environ) | (url_secrets(storage, url) if url != storage else {})
        sys.exit(redacted("".join(traceback.format_exception(error)), secrets))


if __name__ == "__main__":
    main()
