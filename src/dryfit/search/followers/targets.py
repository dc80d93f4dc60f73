"""Targets of followers, and a tracker's requirements: package, variables, URL."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dryfit.config.trackers import ENVIRONMENT_PREFIX, Tracker, TrackerName, tracker_of
from dryfit.core.errors import MachineError
from dryfit.core.text.secrets import public_environment

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
        named = self.where.startswith(ENVIRONMENT_PREFIX)
        return self.where.removeprefix(ENVIRONMENT_PREFIX) if named else None


def target_of(entry: str) -> Mirror | Tracker:
    """Return the target of a follower's process."""
    return Mirror(entry.removeprefix(_MIRROR_PREFIX)) if entry.startswith(_MIRROR_PREFIX) else tracker_of(entry)


def storage_url(storage: str, environment: Mapping[str, str]) -> str:
    """Return the URL that ``env:NAME`` stands for, or any other storage as it is.

    Raises:
        MachineError: There is no such variable.
    """
    name = Mirror(storage).variable
    if name is None:
        return storage
    if not environment.get(name):
        raise MachineError(
            f'opening search.mirror = "{storage}"',
            f"the environment variable {name} is not set",
            "a variable that holds an Optuna storage URL",
            f"export {name}=postgresql://...",
        )
    return environment[name]


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
    if tracker.variable is None:
        return tracker.where
    if not environment.get(tracker.variable):
        raise MachineError(
            f'opening study.track = "{tracker.entry}"',
            f"the environment variable {tracker.variable} is not set",
            "a variable that holds the URL of an MLflow server",
            f"export {tracker.variable}=http://...",
        )
    return environment[tracker.variable]


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
    try:
        with socket.create_connection((host or "localhost", port), timeout=_CONNECT_S):
            return ""
    except OSError as error:
        return f"{host} on port {port}: {error.strerror or error}"


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
