"""Every path of a study, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def shared_traces(environment: Mapping[str, str], home: Path) -> Path:
    """Folder of recorded traces, shared by all studies of a user; safe to delete.

    Args:
        environment: ``DRYFIT_CACHE`` decides where dryfit's caches are, else ``XDG_CACHE_HOME`` is heeded (XDG Base
            Directory Specification: a relative path there is to be ignored).
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
        """Where each tensor of the trial's model came from; JSON of a ``LoadReport``."""
        return self.folder / "load.json"

    def planning(self, number: int) -> Path:
        """The folder of try ``number`` to plan the trial's memory, counted from 1."""
        return self.folder / f"plan-{number}"

    def attempt(self, number: int) -> Path:
        """The folder of attempt ``number``, counted from 1."""
        return self.folder / f"attempt-{number}"


@dataclass(frozen=True, slots=True)
class FinalLayout(TrialLayout):
    """The folder of a configuration that is trained once more: a trial's, with what comes of it."""

    @property
    def lock(self) -> Path:
        """Held by the one process that trains it."""
        return self.folder / "lock"

    @property
    def model(self) -> Path:
        """The saved model."""
        return self.folder / "model"

    @property
    def stop_request(self) -> Path:
        """A file that asks to stop, as a study has one."""
        return self.folder / "stop"

    @property
    def attempts(self) -> int:
        """How many attempts there were."""
        return len(list(self.folder.glob("attempt-*")))


@dataclass(frozen=True, slots=True)
class StudyLayout:
    """The folder of a study."""

    folder: Path

    @property
    def study_file(self) -> Path:
        """What the user wrote."""
        return self.folder / "study.toml"

    @property
    def frozen_file(self) -> Path:
        """The resolved configuration the study was last run with."""
        return self.folder / "frozen.toml"

    @property
    def ledger(self) -> Path:
        """The one durable record."""
        return self.folder / "ledger.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the one process that may write the ledger."""
        return self.folder / "lock"

    @property
    def stop_request(self) -> Path:
        """Written by ``dryfit stop``, removed when it has been obeyed."""
        return self.folder / "stop"

    @property
    def wakeup_fifo(self) -> Path:
        """FIFO that children ring."""
        return self.folder / "doorbell"

    @property
    def cache(self) -> Path:
        """Tokenised data; safe to delete."""
        return self.folder / "cache"

    @property
    def logs(self) -> Path:
        """Logs of the processes that belong to no trial."""
        return self.folder / "logs"

    @property
    def mirror_status(self) -> Path:
        """Where the mirror says how far it is, and which journal it writes."""
        return self.logs / "mirror.json"

    @property
    def journal(self) -> Path:
        """The derived Optuna journal, unless the mirror had to begin another one."""
        return self.folder / "optuna.journal"

    @property
    def preparations(self) -> Path:
        """Folders of the children that checked the data."""
        return self.folder / "prepare"

    @property
    def report(self) -> Path:
        """The page that ``dryfit report`` makes."""
        return self.folder / "report" / "index.html"

    @property
    def trials(self) -> Path:
        """Folders of the trials."""
        return self.folder / "trials"

    @property
    def finals(self) -> Path:
        """Folders of configurations that were trained once more."""
        return self.folder / "final"

    def final(self, name: str) -> FinalLayout:
        """The folder of a configuration that is trained once more."""
        return FinalLayout(self.finals / name)

    def trial(self, number: int) -> TrialLayout:
        """The folder of trial ``number``."""
        return TrialLayout(self.trials / f"{number:04d}")
