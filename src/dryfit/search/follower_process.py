"""The process of one follower: writes the study's runs to its target and retries until it is stopped.

    python -m dryfit.search.follower_process --ledger PATH --status PATH [--position PATH] [--parent PID]

Stdin has the target, as every user of a machine sees command lines: an entry of ``study.track``, or ``optuna:STORAGE``.
The URL in an environment variable may hold a password; it is read here and nowhere else.
A position file says how much of the ledger a tracker has for certain: a later process goes on from there. The mirror
has none, as what its storage lacks shows in the storage.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import optuna

from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import StudyLock
from dryfit.processes.process import die_with_parent
from dryfit.search.follower_runs import Runs, RunWriter, parse_event
from dryfit.search.followers import LONGEST_PAUSE_S, Mirror, pause_after, resolved, said_in, storage_url, target_of
from dryfit.search.mlflow_follower import MlflowRuns
from dryfit.search.optuna_follower import OptunaTrials, open_storage
from dryfit.search.tensorboard_follower import TensorBoardFiles
from dryfit.search.trackio_follower import TrackioRuns
from dryfit.search.wandb_follower import WandbRuns
from dryfit.settings.files import write_text_atomic
from dryfit.settings.secrets import redacted, secrets_of, url_secrets
from dryfit.settings.study_file_checks import Tracker, TrackerName
from dryfit.settings.text import LineTail

_LINES = 500
"""So many are written before the position is noted."""
_POLL_S = 0.1
_NICENESS = 10
_ERROR_MAX_CHARS = 1_000
_CAUSES_MAX = 3


def error_line(error: BaseException) -> str:
    """Return an error and its causes on one line: Optuna's own errors omit the driver's."""
    links: list[str] = []
    link: BaseException | None = error
    while link is not None and len(links) < _CAUSES_MAX:
        links.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return " ".join("; from ".join(links).split())


class FollowerStatus:
    """The file with a follower's progress and the time since its target fails.

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

    def knows(self, **facts: str) -> None:
        """Say these facts as well from now on."""
        self._reached |= facts

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


class PositionFile:
    """The file with a tracker's position in the ledger.

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


class LedgerFollower:
    """Follows one ledger into one target.

    Args:
        ledger: The ledger.
        new_writer: Makes what writes, from the ledger's first line.
        position: Where the target's position is kept; None: everything is compared with the target.
        status: Where it says how far it is.
    """

    def __init__(
        self,
        ledger: Path,
        *,
        new_writer: Callable[[bytes], RunWriter],
        status: FollowerStatus,
        position: PositionFile | None = None,
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
        most = None if self._position is None else _LINES
        while lines := list(islice(self._tail.read(), most)):
            self._take(lines)
        return self._tail.offset > before

    def _take(self, lines: list[bytes]) -> None:
        before = self._tail.offset - sum(len(line) + 1 for line in lines)
        if self._writer is None:
            self._writer = self._new_writer(lines[0])
            if self._position is not None:
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
            event = parse_event(line)
            number = self._runs.apply(event) if event is not None else None
            if number is not None and offset > self._start and number not in self._settled:
                changed.add(number)
        return changed if offset > self._start else None

    def _note(self, changed: set[int], before: int) -> None:
        assert self._writer is not None
        if self._position is None:
            return
        unsettled = self._writer.unsettled()
        since = max(before, self._start)
        self._since = {number: self._since.get(number, since) for number in unsettled}
        offset = min(self._since.values(), default=self._tail.offset)
        self._settled |= {number for number in changed - unsettled if self._runs.runs[number].ended}
        if offset == self._tail.offset:
            self._settled.clear()
        self._position.write(offset, self._settled)


def writer_of(target: Mirror | Tracker, study: Path, first_line: bytes, status: FollowerStatus) -> RunWriter:
    """Return the writer of a target.

    Args:
        target: Which one.
        study: The study's folder.
        first_line: The first line of its ledger.
        status: Is told which file the mirror writes.

    Raises:
        MachineError: The variable that has its URL is not set.
    """
    if isinstance(target, Mirror):
        storage, journal = open_storage(storage_url(target.where, os.environ))
        status.knows(journal=journal)
        return OptunaTrials(storage, first_line)
    where = resolved(target, study, os.environ)
    match target.name:
        case TrackerName.TENSORBOARD:
            return TensorBoardFiles(Path(where))
        case TrackerName.MLFLOW:
            return MlflowRuns(where)
        case TrackerName.WANDB:
            return WandbRuns(where, StudyLayout(study).trackers)
        case TrackerName.TRACKIO:
            return TrackioRuns(where)


def follow(
    new_follower: Callable[[], LedgerFollower], *, ending: Callable[[], bool], failed: Callable[[Exception], None]
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


def main(argv: list[str] | None = None) -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m dryfit.search.follower_process", description="Follow a ledger.")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--status", type=Path, required=True)
    parser.add_argument("--position", type=Path)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args(argv)
    ending = follower_ending(options.parent)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # this process does nothing else
    target = target_of(sys.stdin.readline().strip())
    secrets = secrets_of(os.environ)
    if target.variable is not None:
        secrets |= url_secrets(target.variable, os.environ.get(target.variable, ""))
    status = FollowerStatus(options.status, secrets)
    if isinstance(target, Tracker):
        status.reached(0, entry=target.entry)
    followers: list[LedgerFollower] = []

    def new_follower() -> LedgerFollower:
        follower = LedgerFollower(
            options.ledger,
            new_writer=lambda first_line: writer_of(target, options.ledger.parent, first_line, status),
            position=PositionFile(options.position) if options.position is not None else None,
            status=status,
        )
        followers[:] = [follower]
        return follower

    locked = StudyLock(options.position.with_suffix(".lock")) if options.position is not None else nullcontext()
    with locked:
        done = follow(new_follower, ending=ending, failed=status.failed)
        if done:
            followers[0].close()
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
