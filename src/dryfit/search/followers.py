"""The followers of a study: Optuna storage and experiment trackers, fed beside the search."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from dryfit.ledger.events import Event
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.processes.helpers import end_helper, python_command, start_helper
from dryfit.settings.errors import MachineError
from dryfit.settings.files import closing, contents
from dryfit.settings.secrets import public_environment
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import Tracker, TrackerName, tracker_of, variable_of
from dryfit.settings.wire import Message

# Targets of followers, and a tracker's requirements: package, variables, URL.


_CONNECT_S = 5.0

TRACKIO_SERVER = "TRACKIO_SERVER_URL"
"""The variable that names a Trackio server; without it Trackio writes to this machine."""

_READS = {
    TrackerName.TENSORBOARD: frozenset[str](),
    TrackerName.MLFLOW: frozenset({"MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN"}),
    TrackerName.WANDB: frozenset({"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"}),
    TrackerName.TRACKIO: frozenset({"TRACKIO_WRITE_TOKEN", TRACKIO_SERVER}),
}
"""Secrets that the clients read; a tracker's process has no others."""

JOURNAL_PREFIX = "journal:"
_MIRROR_PREFIX = "optuna:"
_OF_DRIVERS = frozenset({"PGPASSWORD", "MYSQL_PWD"})
"""Variables that the clients of PostgreSQL and MySQL read passwords from."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """The Optuna storage that follows the ledger.

    Attributes:
        where: ``journal:PATH``, ``env:NAME`` or an Optuna storage URL.
    """

    where: str

    @property
    def entry(self) -> str:
        """What its process is told: no entry of ``study.track`` begins so."""
        return f"{_MIRROR_PREFIX}{self.where}"

    @property
    def variable(self) -> str | None:
        """The environment variable that has the URL; None: it is here."""
        return variable_of(self.where)


def target_of(entry: str) -> Mirror | Tracker:
    """Return the target of a follower's process."""
    return Mirror(entry.removeprefix(_MIRROR_PREFIX)) if entry.startswith(_MIRROR_PREFIX) else tracker_of(entry)


def _url_of(target: Mirror | Tracker, doing: str, environment: Mapping[str, str], url: str, example: str) -> str:
    """Return the URL in the variable of a target, or where the target is by itself.

    Raises:
        MachineError: There is no such variable.
    """
    name = target.variable
    if name is None:
        return target.where
    if not environment.get(name):
        found, allowed = f"the environment variable {name} is not set", f"a variable that holds {url}"
        raise MachineError(doing, found, allowed, f"export {name}={example}")
    return environment[name]


def storage_url(storage: str, environment: Mapping[str, str]) -> str:
    """Return the URL that ``env:NAME`` stands for, or any other storage as it is.

    Raises:
        MachineError: There is no such variable.
    """
    doing = f'opening search.mirror = "{storage}"'
    return _url_of(Mirror(storage), doing, environment, "an Optuna storage URL", "postgresql://...")


def target_environment(target: Mirror | Tracker, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a follower's process: of the secrets, it has the target's own."""
    if isinstance(target, Tracker):
        keep = _READS[target.name]
    else:
        keep = frozenset[str]() if target.where.startswith(JOURNAL_PREFIX) else _OF_DRIVERS
    return public_environment(environment, keep=keep if target.variable is None else keep | {target.variable})


def resolved(tracker: Tracker, study: Path, environment: Mapping[str, str]) -> str:
    """Return a tracker's target: the URL in its variable, a folder, or the entry itself.

    Raises:
        MachineError: There is no such variable.
    """
    if tracker.name is TrackerName.TENSORBOARD:
        return str(study / Path(tracker.where).expanduser())
    doing = f'opening study.track = "{tracker.entry}"'
    return _url_of(tracker, doing, environment, "the URL of an MLflow server", "http://...")


def demand_tracker(tracker: Tracker, study: Path, environment: Mapping[str, str]) -> str:
    """Return where a tracker writes; refuse to begin with one that never could.

    A server that does not answer is no reason: it is tried again for as long as the study runs.

    Raises:
        MachineError: Its package is not installed, its variable is not set, or its folder may not be written to.
    """
    doing = f'preparing study.track = "{tracker.entry}"'
    package = find_spec(tracker.name)
    if package is None or package.origin is None:  # a folder of that name is no package: wandb leaves one
        raise _not_installed(doing, tracker.name)
    where = resolved(tracker, study, environment)
    folder = where if tracker.name is TrackerName.TENSORBOARD else ""
    if tracker.name is TrackerName.TRACKIO and not environment.get(TRACKIO_SERVER):
        folder = environment.get("TRACKIO_DIR", "")
    if folder and (trouble := unwritable(Path(folder))):
        raise MachineError(doing, trouble, "a folder that can be written to")
    return where


def demand_trackers(entries: Sequence[str], study: Path, environment: Mapping[str, str]) -> None:
    """Refuse to begin where an entry of ``study.track`` could never be written, or two are one target.

    Raises:
        MachineError: See :func:`demand_tracker`.
    """
    seen: dict[tuple[TrackerName, str], str] = {}
    for entry in entries:
        tracker = tracker_of(entry)
        where = demand_tracker(tracker, study, environment)
        earlier = seen.setdefault((tracker.name, where), entry)
        if earlier != entry:
            raise MachineError(f'preparing study.track = "{entry}"', f'"{earlier}" is the same target', "each once")


def server_trouble(tracker: Tracker, where: str, environment: Mapping[str, str]) -> str:
    """Return why a tracker's server could not be written now; empty: nothing is known against it.

    Args:
        tracker: Which one.
        where: What :func:`demand_tracker` returned.
        environment: Has its key, and whether it is to go to a server at all.
    """
    if tracker.name is TrackerName.WANDB:
        offline = environment.get("WANDB_MODE") in ("offline", "disabled")
        has_key = bool(environment.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
        missing = "neither WANDB_API_KEY nor ~/.netrc has a key, and WANDB_MODE is not offline"
        return "" if offline or has_key else missing
    if tracker.name is TrackerName.TENSORBOARD:
        return ""
    url = environment.get(TRACKIO_SERVER, "") if tracker.name is TrackerName.TRACKIO else where
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "it is no URL"
    if parts.scheme not in ("http", "https"):
        return ""
    silent = silence(host, port)
    return f"{host} on port {port}: {silent}" if silent else ""


def silence(host: str | None, port: int) -> str:
    """Return why nobody answers on a port of a host, of this machine where none is named; empty: somebody does."""
    try:
        with socket.create_connection((host or "localhost", port), timeout=_CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def client(name: str, part: str = "") -> Any:
    """Import the package of a tracker, or a module in it; its types are unknown where it is not installed.

    Raises:
        MachineError: It is not installed.
    """
    try:
        return import_module(f"{name}{part}")
    except ImportError as error:
        raise _not_installed(f"importing {name}{part}", name) from error


def _not_installed(doing: str, name: str) -> MachineError:
    return MachineError(doing, f"{name} is not installed", name, f"pip install 'dryfit[{name}]'")


def unwritable(folder: Path) -> str:
    """Return why files cannot be written below a folder; empty: they can, once it is made."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        return f"{at} is no folder"
    return "" if os.access(at, os.W_OK | os.X_OK) else f"{at} may not be written to"


# Run the followers of the ledger beside a running study; they cannot delay or fail a trial.
#
# Nothing here raises, or waits for a follower without a limit.


LONGEST_PAUSE_S = 60.0
"""What cannot be written, or a follower that dies, is tried again at least so often."""

_DRAIN_S = 60.0
"""At most, for all followers together, when a session ends; one whose target cannot be written gets one more try."""
_STARTS_AT_END = 2
_POLL_S = 0.02
_STOP_GRACE_S = 5.0


def pause_after(failures: int) -> float:
    """Return how many seconds to wait after so many failures before: 1, 2, 4 ... up to :data:`LONGEST_PAUSE_S`."""
    return min(LONGEST_PAUSE_S, 2.0 ** min(failures, 10))


class FollowerProcess:
    """A process that copies a study's ledger to a target.

    Args:
        ledger: The study's ledger.
        target: Where it writes; it reads that from its stdin.
        status: File in which it says how far it is.
        log: File for its output.
        position: File that says how much of the ledger the target has for certain; None: ``status`` does.
    """

    def __init__(
        self, ledger: Path, target: Mirror | Tracker, *, status: Path, log: Path, position: Path | None = None
    ) -> None:
        self.target = target
        self._ledger = ledger
        positions = ["--position", str(position)] if position is not None else []
        arguments = ["--ledger", str(ledger), *positions, "--status", str(status)]
        self._command = python_command("dryfit.search.follower_process", *arguments)
        self._status = status
        self._position = position or status
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._starts = 0
        self._started_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id; None where it never started."""
        return None if self._process is None else self._process.pid

    @property
    def left_bytes(self) -> int:
        """How many bytes of the ledger the target lacks for certain; 0 where there is no ledger any more."""
        try:
            size = self._ledger.stat().st_size
        except FileNotFoundError:
            return 0
        return max(0, size - max(0, followed_bytes(self._position)))

    def start(self) -> None:
        """Start the process; call from the main thread (its death is tied to the thread that made it)."""
        now_s = time.monotonic()
        # One that ran for long begins anew: it was no failure of its start.
        self._starts = self._starts + 1 if now_s - self._started_s < LONGEST_PAUSE_S else 1
        self._started_s = now_s
        try:
            self._status.unlink(missing_ok=True)
            self._process = start_helper(
                [*self._command, "--parent", str(os.getpid())],
                environment=target_environment(self.target, os.environ),
                log=self._log,
                stdin=subprocess.PIPE,
            )
        except OSError:  # no process, no descriptor, no disk: the study goes on, and it is tried again
            self._process = None
            return
        with suppress(OSError):  # it died already
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(self.target.entry.encode() + b"\n")

    def keep_alive(self) -> None:
        """Start it again where it died, later and later where it dies again and again. Costs one ``waitpid``."""
        if self._ended or self.alive:
            return
        if time.monotonic() >= self._started_s + pause_after(self._starts - 1):
            self.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that the ledger holds now is written; nothing more will be added to it.

        A follower that waits for its target to come back tries once more, now, and ends.

        Returns:
            Whether it is; False after ``timeout_s``, or as soon as that last try has failed.
        """
        try:
            size = self._ledger.stat().st_size
        except FileNotFoundError:
            return True
        deadline_s = time.monotonic() + timeout_s
        starts_left = _STARTS_AT_END
        while followed_bytes(self._status) < size:
            if not self.alive:
                if starts_left == 0:
                    return False
                starts_left -= 1
                self.start()
            elif trouble_of(self._status):
                self.stop(max(0.0, deadline_s - time.monotonic()))
                return followed_bytes(self._status) >= size
            elif time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def ask_to_end(self) -> None:
        """Ask it to write what is left and to end; does not wait."""
        self._ended = True
        if self._process is not None and self.alive:
            self._process.terminate()

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Ask it to write what is left and to end; kill it, and what it has started, after a while."""
        self.ask_to_end()
        if self._process is not None:
            end_helper(self._process, grace_s)


def followed_bytes(status: Path) -> int:
    """Return how many bytes of the ledger are written, from a follower's status file; -1: unknown."""
    try:
        return int(said_in(status)["offset"])
    except (ValueError, KeyError, TypeError):
        return -1


def trouble_of(status: Path) -> tuple[float, str] | None:
    """Return since when a follower's target cannot be written (Unix seconds), and the error; None: it can be."""
    said = said_in(status)
    since_s, error = said.get("failing_since_s"), said.get("error")
    return (float(since_s), error) if isinstance(since_s, int | float) and isinstance(error, str) else None


def said_in(status: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; empty where there is none."""
    try:
        said = json.loads(contents(status) or b"")
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}


@dataclass(frozen=True, slots=True)
class FollowerKeeper:
    """Starts followers again that have died, whenever the ledger has grown.

    It is called by the study's own thread, as their death is tied to it; it neither raises nor waits.
    """

    followers: tuple[FollowerProcess, ...]

    def on_open(self, layout: StudyLayout) -> None:
        """The followers know where the ledger is."""

    def on_event(self, event: Event, state: StudyState) -> None:
        """Start those again that died."""
        for follower in self.followers:
            follower.keep_alive()

    def on_message(self, number: int, message: Message) -> None:
        """Nothing to follow: the ledger has all that is shown."""

    def on_note(self, text: str) -> None:
        """Nothing to follow."""


def followers_of(config: StudyConfig, layout: StudyLayout) -> tuple[FollowerProcess, ...]:
    """Return the processes of ``search.mirror`` and ``study.track``; none is started."""
    found: list[FollowerProcess] = []
    if config.search.mirror != "none":
        named = config.search.mirror
        mirror = Mirror(f"{JOURNAL_PREFIX}{layout.journal}" if named == "journal" else named)
        log = layout.logs / "mirror.txt"
        found.append(FollowerProcess(layout.ledger, mirror, status=layout.mirror_status, log=log))
    for tracker in map(tracker_of, config.study.track):
        files = layout.tracker(tracker.slug)
        found.append(
            FollowerProcess(layout.ledger, tracker, status=files.status, log=files.log, position=files.position)
        )
    return tuple(found)


@contextmanager
def followed(
    config: StudyConfig, layout: StudyLayout, note: Callable[[str], None]
) -> Generator[list[FollowerKeeper], None, None]:
    """Run the followers beside the study; at the end they get some time for what is left.

    Args:
        config: The study.
        layout: Its folder.
        note: Is told in a sentence what a follower lacks at the end.

    Yields:
        The observer that starts them again where they died; none without a follower.
    """
    present = {layout.tracker(tracker_of(entry).slug).status for entry in config.study.track}
    for status in set(layout.tracker_statuses) - present:
        status.unlink(missing_ok=True)
    processes = followers_of(config, layout)
    if not processes:
        yield []
        return
    if config.study.track:
        layout.trackers.mkdir(exist_ok=True)
    with ExitStack() as stack:
        for process in processes:
            process.start()
            stack.push(closing(process.stop))
        yield [FollowerKeeper(processes)]
        _drain(processes)
    for process in processes:
        if left := process.left_bytes:
            name = process.target.entry if isinstance(process.target, Tracker) else "the Optuna mirror"
            lacks = f"{name} lacks the last {left} bytes of the ledger"
            note(f"{lacks}: `dryfit resume {layout.folder}` goes on with them")


def _drain(processes: Sequence[FollowerProcess]) -> None:
    deadline_s = time.monotonic() + _DRAIN_S

    def left_s() -> float:
        return max(0.0, deadline_s - time.monotonic())

    for process in processes:
        process.flush(left_s())
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.stop(left_s())
