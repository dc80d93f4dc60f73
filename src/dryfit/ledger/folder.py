"""A study's folder: its paths, and attempts in it that the ledger does not know."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import LedgerError
from dryfit.settings.text import few


def attempt_key(trial: int, attempt: int) -> str:
    """Return the name of an attempt's process, unique in its study."""
    return f"trial-{trial}-{attempt}"


def shared_traces(environment: Mapping[str, str], home: Path) -> Path:
    """Return the folder of recorded traces, shared by all studies of a user; safe to delete.

    Args:
        environment: ``DRYFIT_CACHE`` is used if set, else ``XDG_CACHE_HOME`` (a relative path there is ignored, as the
            XDG Base Directory Specification says).
        home: The user's home folder.
    """
    own, cache = environment.get("DRYFIT_CACHE"), environment.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own).expanduser().absolute() / "traces"
    return (Path(cache) if cache.startswith("/") else home / ".cache") / "dryfit" / "traces"


class _Inside:
    """The path of something in the folder that a layout describes."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, layout: "AttemptLayout | TrialLayout | StudyLayout", kind: type) -> Path:
        return layout.folder.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """The folder of one attempt: only its own process writes below it, and only until the attempt has ended."""

    folder: Path

    checkpoints = _Inside("checkpoints")
    """Resumable checkpoints that the attempt writes."""
    best = _Inside("best")
    """The weights of its best validation, if that is better than those of the attempts before it."""
    scored = _Inside("scored")
    """The rows of its best validation with their answers; of a final training also those of test."""
    model = _Inside("model")
    """The model that a final training saves."""
    load_report = _Inside("load.json")
    """Origin of each tensor of its model; JSON of a ``LoadReport``."""


@dataclass(frozen=True, slots=True)
class TrialLayout:
    """The folder of one trial.

    What lies in it is the control process's own, but for the folders of the attempts.
    """

    folder: Path

    checkpoints = _Inside("checkpoints")
    """Resumable checkpoints that ended attempts left; gone once the trial has ended."""
    best = _Inside("best")
    """The weights of the best validation of all ended attempts; a folder that ``dryfit.load`` opens."""
    scored = _Inside("scored")
    """The rows of the best validation with their answers, a file for each fold; they stay, whatever is kept."""
    load_report = _Inside("load.json")
    """The load report of the last attempt that has ended and had a model."""

    def planning(self, number: int) -> Path:
        """Return the folder of planning attempt ``number``, from 1."""
        return self.folder / f"plan-{number}"

    def attempt(self, number: int) -> Path:
        """Return the folder of attempt ``number``, from 1."""
        return self.folder / f"attempt-{number}"

    def files_of(self, attempt: int) -> AttemptLayout:
        """Return what lies in the folder of attempt ``attempt``, from 1."""
        return AttemptLayout(self.attempt(attempt))


@dataclass(frozen=True, slots=True)
class FinalLayout(TrialLayout):
    """The folder of a final training: as a trial's, and with the saved model."""

    lock = _Inside("lock")
    """Lock held by the process that trains it."""
    model = _Inside("model")
    """The saved model."""
    stop_request = _Inside("stop")
    """A file whose presence asks the training to stop."""

    @property
    def attempts(self) -> int:
        """Number of attempts so far."""
        return len(list(self.folder.glob("attempt-*")))


@dataclass(frozen=True, slots=True)
class TrackerLayout:
    """The files of one tracker's process.

    Attributes:
        position: How much of the ledger the tracker has for certain; it stays between sessions.
        status: How far the process is, and since when it fails; removed when the next one starts.
        log: The process's output.
    """

    position: Path
    status: Path
    log: Path


@dataclass(frozen=True, slots=True)
class StudyLayout:
    """The folder of a study."""

    folder: Path

    study_file = _Inside("study.toml")
    """The user's study file."""
    frozen_file = _Inside("frozen.toml")
    """The resolved configuration the study was last run with."""
    ledger = _Inside("ledger.jsonl")
    """The ledger of events."""
    lock = _Inside("lock")
    """Lock held by the process that may write the ledger."""
    stop_request = _Inside("stop")
    """Written by ``dryfit stop``, removed once the study has stopped."""
    wakeup_fifo = _Inside("doorbell")
    """FIFO that children write to, to wake the control process."""
    cache = _Inside("cache")
    """Tokenised data; safe to delete."""
    logs = _Inside("logs")
    """Logs of processes that belong to no trial."""
    nodes = _Inside("nodes")
    """What agents on other machines need to join."""
    node_address = _Inside("nodes", "address.json")
    """Where the control process listens for them; there while it does."""
    node_token = _Inside("nodes", "token")
    """The secret that both sides prove to have; readable by its owner alone."""
    node_certificate = _Inside("nodes", "certificate.pem")
    """With ``nodes.tls``: the control process's key and certificate; readable by its owner alone."""
    mirror_status = _Inside("logs", "mirror.json")
    """The mirror's progress, and the journal it writes."""
    journal = _Inside("optuna.journal")
    """The Optuna journal of the mirror, unless it had to begin another one."""
    trackers = _Inside("trackers")
    """How much of the ledger each tracker of ``study.track`` has."""
    baselines = _Inside("baselines")
    """What the metric is worth without a model: scored rows of each baseline, and the groups of all rows."""
    preparations = _Inside("prepare")
    """Folder of the child processes that checked the data."""
    report = _Inside("report", "index.html")
    """The HTML page that ``dryfit report`` writes."""
    trials = _Inside("trials")
    """Folders of the trials."""
    finals = _Inside("final")
    """Folders of final trainings."""
    comparison = _Inside("final", "compare.json")
    """The last comparison of the best trials over several seeds."""

    def node_log(self, node: str) -> Path:
        """Return the log of a node's agent."""
        return self.nodes / node / "agent.txt"

    def node_heard(self, node: str) -> Path:
        """Return the empty file whose time of change says when a node was heard last."""
        return self.nodes / node / "heard"

    def node_server_log(self, node: str) -> Path:
        """Return the log of what makes a node's children."""
        return self.nodes / node / "forkserver.txt"

    def tracker(self, slug: str) -> TrackerLayout:
        """Return the files of a tracker's process."""
        log = self.logs / f"track-{slug}"
        return TrackerLayout(self.trackers / f"{slug}.json", log.with_suffix(".json"), log.with_suffix(".txt"))

    @property
    def tracker_statuses(self) -> list[Path]:
        """The status files of all trackers, sorted."""
        return sorted(self.logs.glob("track-*.json"))

    def final(self, name: str) -> FinalLayout:
        """Return the folder of a final training."""
        return FinalLayout(self.finals / name)

    def trial(self, number: int) -> TrialLayout:
        """Return the folder of trial ``number``."""
        return TrialLayout(self.trials / f"{number:04d}")


def demand_known_attempts(state: StudyState, layout: StudyLayout) -> None:
    """Refuse to go on with a ledger that is older than the study's folder, as a copy that was put back is.

    An attempt's folder is made once its event is on disk, so one without an event tells that the ledger once went on.
    To go on would compute those trials again over their own files, from checkpoints ahead of their reports.

    Raises:
        LedgerError: It is older. The message says which trials it does not know all of, and what to do.
    """
    ahead = sorted(_ahead(state, layout))
    if not ahead:
        return
    kept = max(layout.folder.glob("ledger-kept-*.jsonl"), default=None)
    newer = "put the newer one back" + (f": mv {kept} {layout.ledger}" if kept is not None else "")
    raise LedgerError(
        f"opening the study in {layout.folder}",
        f"its ledger is older than its folder: it does not know all attempts in {few(map(str, ahead), 3)}",
        "the ledger that the study was last run with",
        f"{newer}; or move those trials' folders elsewhere, and they are computed again",
    )


def _ahead(state: StudyState, layout: StudyLayout) -> Iterator[Path]:
    """Yield the folder of each trial with an attempt that the ledger does not know."""
    for folder in layout.trials.glob("[0-9]*"):
        number = int(folder.name) if folder.name.isdecimal() else -1
        trial = state.trials[number] if 0 <= number < len(state.trials) else None
        if number < 0 or layout.trial(number).folder != folder or (trial is not None and trial.outcome is not None):
            continue
        known = len(trial.attempts) if trial is not None else 0
        if layout.trial(number).attempt(known + 1).exists():
            yield folder
