"""Parse and check the entries of ``study.track``."""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from dryfit.config.problems import Problem, shown
from dryfit.core.text.words import did_you_mean

_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_PROJECT = re.compile(r"([A-Za-z0-9._-]{1,128}/)?[A-Za-z0-9._-]{1,128}")
_LIKE_A_KEY = re.compile(r"[0-9a-f]{32,}|hf_[A-Za-z0-9]{20,}|wandb_v[0-9]_\S{20,}|dapi[0-9a-f]{20,}")
"""Keys of Weights & Biases and Databricks, tokens of the hub."""

ENVIRONMENT_PREFIX = "env:"


class TrackerName(StrEnum):
    """What a study can be shown in."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    TRACKIO = "trackio"


_AFTER_COLON = {
    TrackerName.TENSORBOARD: "tensorboard, or tensorboard:FOLDER",
    TrackerName.MLFLOW: "mlflow:env:NAME, mlflow:URL, or mlflow (MLFLOW_TRACKING_URI)",
    TrackerName.WANDB: "wandb, wandb:PROJECT or wandb:ENTITY/PROJECT",
    TrackerName.TRACKIO: "trackio, or trackio:PROJECT",
}


@dataclass(frozen=True, slots=True)
class Tracker:
    """One entry of ``study.track``.

    Attributes:
        entry: As it is written.
        name: Which tracker.
        where: What follows the first colon, or what its absence means; of wandb and trackio empty: a project of the
            study's name.
    """

    entry: str
    name: TrackerName
    where: str

    @property
    def variable(self) -> str | None:
        """The environment variable that has the URL; None: it is in the file."""
        named = self.where.startswith(ENVIRONMENT_PREFIX)
        return self.where.removeprefix(ENVIRONMENT_PREFIX) if named else None

    @property
    def slug(self) -> str:
        """What its files are called: its name, and where it is not the only meaning of that, a hash of the entry."""
        if self.entry == self.name:
            return self.entry
        return f"{self.name}-{hashlib.sha256(self.entry.encode()).hexdigest()[:6]}"


_MEANT = {TrackerName.TENSORBOARD: "tensorboard", TrackerName.MLFLOW: "env:MLFLOW_TRACKING_URI"}


def tracker_of(entry: str) -> Tracker:
    """Parse a valid entry."""
    name, _, where = entry.partition(":")
    known = TrackerName(name)
    return Tracker(entry, known, where or _MEANT.get(known, ""))


def tracker_problems(entries: tuple[str, ...]) -> list[Problem]:
    """Return the problems of the entries of ``study.track``."""
    problems: list[Problem] = []
    meant: dict[tuple[str, str], str] = {}
    for index, entry in enumerate(entries):
        place = ("study", "track", index)
        problem = _entry_problem(entry)
        if problem is not None:
            problems.append(Problem(place, *problem))
            continue
        tracker = tracker_of(entry)
        earlier = meant.setdefault((tracker.name, tracker.where), entry)
        if earlier is not entry or entries.index(entry) != index:
            problems.append(Problem(place, f"is {shown(entry)}, which {shown(earlier)} means too", "each target once"))
    return problems


def _entry_problem(entry: str) -> tuple[str, str, str] | None:
    name, colon, where = entry.partition(":")
    if name not in list(TrackerName):
        return f"is {shown(entry)}", ", ".join(TrackerName), did_you_mean(name.lower(), TrackerName)
    if _LIKE_A_KEY.search(where):
        hint = "keep it in the variable that the tracker reads, such as WANDB_API_KEY"
        return "has what looks like a key in it", _AFTER_COLON[TrackerName(name)], hint
    wrong = bool(colon and not where) or where != where.strip()
    if where.startswith(ENVIRONMENT_PREFIX):
        wrong = wrong or name != TrackerName.MLFLOW or not _VARIABLE.fullmatch(where)
    elif name == TrackerName.WANDB and where:
        wrong = wrong or not _PROJECT.fullmatch(where)
    elif name == TrackerName.TRACKIO and where:
        wrong = wrong or "/" in where or not _PROJECT.fullmatch(where)
    elif name == TrackerName.MLFLOW and where:
        wrong = wrong or ":" not in where
    return (f"is {shown(entry)}", _AFTER_COLON[TrackerName(name)], "") if wrong else None
