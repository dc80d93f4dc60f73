"""The mirror process: follow a ledger and keep an Optuna storage equal to it.

    python -m dryfit.search.mirror.process --ledger PATH --storage journal:PATH|URL|- --study NAME
        --status PATH [--parent PID]

``-`` reads the storage from stdin: every user of a machine sees command lines. A storage ``env:NAME`` is the URL in the
environment variable NAME, which may hold a password; it is read here and nowhere else.
A storage that cannot be written is tried again for as long as the study runs, from the ledger and what the storage has.
"""

import argparse
import os
import sys
from pathlib import Path

import optuna

from dryfit.core.text.secrets import secrets_of, url_secrets
from dryfit.core.text.tail import LineTail
from dryfit.search.mirror.following import FollowerStatus, follow, follower_ending, follower_options
from dryfit.search.mirror.handle import ENVIRONMENT_PREFIX, storage_url
from dryfit.search.mirror.writer import MirrorStores, open_storage


class Mirror:
    """Follows one ledger.

    Args:
        ledger: The ledger.
        storage: What is written, as :func:`dryfit.search.mirror.writer.open_storage` takes it.
        study: Name of the study in it.
        status: Where it says how far it is.
    """

    def __init__(self, ledger: Path, *, storage: str, study: str, status: FollowerStatus) -> None:
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
        self._status.reached(self._tail.offset, journal=self._journal)
        return True


def main(argv: list[str] | None = None) -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m dryfit.search.mirror.process", description="Mirror a ledger.")
    follower_options(parser)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--study", required=True)
    options = parser.parse_args(argv)
    ending = follower_ending(options.parent)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # this process does nothing else
    storage = sys.stdin.readline().strip() if options.storage == "-" else options.storage
    url = storage_url(storage, os.environ)
    secrets = secrets_of(os.environ)
    if url != storage:
        secrets |= url_secrets(storage.removeprefix(ENVIRONMENT_PREFIX), url)
    status = FollowerStatus(options.status, secrets)
    done = follow(
        lambda: Mirror(options.ledger, storage=url, study=options.study, status=status),
        ending=ending,
        failed=status.failed,
    )
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
