"""Paths of everything in a study's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True, slots=True)
class TrialLayout:
    """The folder of one trial."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Resumable checkpoints, shared by the trial's attempts; gone once the trial has ended."""
        return self.folder / "checkpoints"

    @property
    def best(self) -> Path:
        """The weights of the best validation; a folder that ``dryfit.load`` opens."""
        return self.folder / "best"

    @property
    def load_report(self) -> Path:
        """Origin of each tensor of the trial's model; JSON of a ``LoadReport``."""
        return self.folder / "load.json"

    def planning(self, number: int) -> Path:
        """Return the folder of planning attempt ``number``, from 1."""
        return self.folder / f"plan-{number}"

    def attempt(self, number: int) -> Path:
        """Return the folder of attempt ``number``, from 1."""
        return self.folder / f"attempt-{number}"


@dataclass(frozen=True, slots=True)
class FinalLayout(TrialLayout):
    """The folder of a final training: as a trial's, and with the saved model."""

    @property
    def lock(self) -> Path:
        """Lock held by the process that trains it."""
        return self.folder / "lock"

    @property
    def model(self) -> Path:
        """The saved model."""
        return self.folder / "model"

    @property
    def stop_request(self) -> Path:
        """A file whose presence asks the training to stop."""
        return self.folder / "stop"

    @property
    def attempts(self) -> int:
        """Number of attempts so far."""
        return len(list(self.folder.glob("attempt-*")))


@dataclass(frozen=True, slots=True)
class StudyLayout:
    """The folder of a study."""

    folder: Path

    @property
    def study_file(self) -> Path:
        """The user's study file."""
        return self.folder / "study.toml"

    @property
    def frozen_file(self) -> Path:
        """The resolved configuration the study was last run with."""
        return self.folder / "frozen.toml"

    @property
    def ledger(self) -> Path:
        """The ledger of events."""
        return self.folder / "ledger.jsonl"

    @property
    def lock(self) -> Path:
        """Lock held by the process that may write the ledger."""
        return self.folder / "lock"

    @property
    def stop_request(self) -> Path:
        """Written by ``dryfit stop``, removed once the study has stopped."""
        return self.folder / "stop"

    @property
    def wakeup_fifo(self) -> Path:
        """FIFO that children write to, to wake the control process."""
        return self.folder / "doorbell"

    @property
    def cache(self) -> Path:
        """Tokenised data; safe to delete."""
        return self.folder / "cache"

    @property
    def logs(self) -> Path:
        """Logs of processes that belong to no trial."""
        return self.folder / "logs"

    @property
    def mirror_status(self) -> Path:
        """The mirror's progress, and the journal it writes."""
        return self.logs / "mirror.json"

    @property
    def journal(self) -> Path:
        """The Optuna journal of the mirror, unless it had to begin another one."""
        return self.folder / "optuna.journal"

    @property
    def preparations(self) -> Path:
        """Folder of the child processes that checked the data."""
        return self.folder / "prepare"

    @property
    def report(self) -> Path:
        """The HTML page that ``dryfit report`` writes."""
        return self.folder / "report" / "index.html"

    @property
    def trials(self) -> Path:
        """Folders of the trials."""
        return self.folder / "trials"

    @property
    def finals(self) -> Path:
        """Folders of final trainings."""
        return self.folder / "final"

    def final(self, name: str) -> FinalLayout:
        """Return the folder of a final training."""
        return FinalLayout(self.finals / name)

    def trial(self, number: int) -> TrialLayout:
        """Return the folder of trial ``number``."""
        return TrialLayout(self.trials / f"{number:04d}")
