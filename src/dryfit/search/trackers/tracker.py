"""The process of one tracker: follow a ledger and write the study's runs to the tracker.

    python -m dryfit.search.trackers.tracker --ledger PATH --status PATH --position PATH [--parent PID]

Stdin has the entry of ``study.track``. What cannot be written is tried again for as long as the study runs. The
position file says how much of the ledger the tracker has for certain: a later process goes on from there.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from dryfit.config.trackers import Tracker, TrackerName, tracker_of
from dryfit.core.text.secrets import secrets_of, url_secrets
from dryfit.core.text.tail import LineTail
from dryfit.core.wire import write_text_atomic
from dryfit.search.mirror.follower import said_in
from dryfit.search.mirror.following import FollowerStatus, follow, follower_ending, follower_options
from dryfit.search.mirror.model import parse_event
from dryfit.search.trackers.mlflow_runs import MlflowRuns
from dryfit.search.trackers.runs import Runs, RunWriter
from dryfit.search.trackers.targets import resolved
from dryfit.search.trackers.tensorboard_files import TensorBoardFiles
from dryfit.search.trackers.trackio_runs import TrackioRuns
from dryfit.search.trackers.wandb_runs import WandbRuns
from dryfit.store.events import Event
from dryfit.store.layout import StudyLayout
from dryfit.store.lock import StudyLock

_LINES = 500
"""So many are written before the position is noted."""


class PositionFile:
    """The file that says how much of a ledger a tracker has.

    Args:
        file: Where it is; made with the first position.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._of = ""

    def read(self, ledger: str, target: str) -> tuple[int, set[int]]:
        """Return how many bytes the tracker has, and which trials that end behind them; 0 of another ledger or target.

        Args:
            ledger: The ledger's first line.
            target: What tells the target from others. It may hold a password: the file has a hash.
        """
        self._of = hashlib.sha256(f"{ledger}\n{target}".encode()).hexdigest()[:16]
        said = said_in(self._file)
        if said.get("of") != self._of or not isinstance(said.get("offset"), int):
            return 0, set()
        return said["offset"], set(said.get("settled", ()))

    def write(self, offset: int, settled: set[int]) -> None:
        """Write a position; a power cut may undo that, and then a part is compared with the tracker once more."""
        said = {"offset": offset, "settled": sorted(settled), "of": self._of}
        write_text_atomic(self._file, json.dumps(said), durable=False)


class RunFollower:
    """Follows one ledger into one tracker.

    Args:
        ledger: The ledger.
        new_writer: Makes what writes.
        position: Where the tracker's position is kept.
        status: Where it says how far it is.
    """

    def __init__(
        self, ledger: Path, *, new_writer: Callable[[], RunWriter], position: PositionFile, status: FollowerStatus
    ) -> None:
        self._tail = LineTail(ledger)
        self._new_writer = new_writer
        self._writer: RunWriter | None = None
        self._position = position
        self._status = status
        self._runs = Runs()
        self._start = 0
        self._settled: set[int] = set()
        self._since: dict[int, int] = {}

    def catch_up(self) -> bool:
        """Write all new lines of the ledger. Returns whether there were any."""
        before = self._tail.offset
        while lines := list(islice(self._tail.read(), _LINES)):
            self._take(lines)
        return self._tail.offset > before

    def _take(self, lines: list[bytes]) -> None:
        before = self._tail.offset - sum(len(line) + 1 for line in lines)
        if self._writer is None:
            self._writer = self._new_writer()
            self._start, self._settled = self._position.read(lines[0].decode(), self._writer.identity())
        changed = self._changed(lines, before)
        if changed is not None:
            self._writer.write(self._runs, sorted(changed))
            self._note(changed, before)
        self._status.reached(self._tail.offset)

    def close(self) -> None:
        """Hand over what is unsettled, and note that."""
        if self._writer is not None:
            self._writer.close()
            self._note(set(), self._tail.offset)

    def _changed(self, lines: list[bytes], offset: int) -> set[int] | None:
        """Apply lines; return the trials that the tracker may lack something of, None where it has all."""
        changed: set[int] = set()
        for line in lines:
            offset += len(line) + 1
            event: Event | None = parse_event(line)
            number = self._runs.apply(event) if event is not None else None
            if number is not None and offset > self._start and number not in self._settled:
                changed.add(number)
        return changed if offset > self._start else None

    def _note(self, changed: set[int], before: int) -> None:
        assert self._writer is not None
        unsettled = self._writer.unsettled()
        since = max(before, self._start)
        self._since = {number: self._since.get(number, since) for number in unsettled}
        offset = min(self._since.values(), default=self._tail.offset)
        self._settled |= {number for number in changed - unsettled if self._runs.runs[number].ended}
        if offset == self._tail.offset:
            self._settled.clear()
        self._position.write(offset, self._settled)


def writer_of(tracker: Tracker, study: Path) -> RunWriter:
    """Return what writes to a tracker.

    Args:
        tracker: Which one.
        study: The study's folder.

    Raises:
        MachineError: The variable that has its URL is not set.
    """
    where = resolved(tracker, study, os.environ)
    match tracker.name:
        case TrackerName.TENSORBOARD:
            return TensorBoardFiles(Path(where))
        case TrackerName.MLFLOW:
            return MlflowRuns(where)
        case TrackerName.WANDB:
            return WandbRuns(where, StudyLayout(study).trackers)
        case TrackerName.TRACKIO:
            return TrackioRuns(where)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m dryfit.search.trackers.tracker", description="Write runs.")
    follower_options(parser)
    parser.add_argument("--position", type=Path, required=True)
    options = parser.parse_args(argv)
    ending = follower_ending(options.parent)
    tracker = tracker_of(sys.stdin.readline().strip())
    secrets = secrets_of(os.environ)
    if tracker.variable is not None:
        secrets |= url_secrets(tracker.variable, os.environ.get(tracker.variable, ""))
    status = FollowerStatus(options.status, secrets)
    status.reached(0, entry=tracker.entry)
    followers: list[RunFollower] = []

    def new_follower() -> RunFollower:
        follower = RunFollower(
            options.ledger,
            new_writer=lambda: writer_of(tracker, options.ledger.parent),
            position=PositionFile(options.position),
            status=status,
        )
        followers[:] = [follower]
        return follower

    with StudyLock(options.position.with_suffix(".lock")):
        done = follow(new_follower, ending=ending, failed=status.failed)
        if done:
            followers[0].close()
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
