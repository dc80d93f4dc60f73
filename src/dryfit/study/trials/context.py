"""What is known of a study: by the process that runs it, and by one that only reads it."""

from dataclasses import dataclass
from typing import TypeAlias

from dryfit.config.schema import StudyConfig
from dryfit.core.jobs.names import Job
from dryfit.core.jobs.train import ResolveResult
from dryfit.search.space.space import Space
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import Ledger
from dryfit.store.replay import StudyState
from dryfit.study.resources.trial_devices import Parallelism, parallelism


@dataclass(frozen=True, slots=True)
class StudyContext:
    """The study that a session runs; only ``state`` changes meanwhile, with each event of the ledger."""

    config: StudyConfig
    layout: StudyLayout
    space: Space
    ledger: Ledger
    state: StudyState
    resolved: ResolveResult
    cores: int

    @property
    def parallelism(self) -> Parallelism:
        """How many trials may run side by side, as far as cores go."""
        return parallelism(self.config, self.resolved, self.cores)

    @property
    def trial_job(self) -> Job:
        """The job of a trial's process."""
        return Job.TRAIN if self.config.objective is None else Job.OBJECTIVE


@dataclass(frozen=True, slots=True)
class StudySnapshot:
    """A study as its folder has it now, whether it runs or not."""

    config: StudyConfig
    layout: StudyLayout
    state: StudyState
    resolved: ResolveResult
    cores: int

    @property
    def parallelism(self) -> Parallelism:
        """As :attr:`StudyContext.parallelism`."""
        return parallelism(self.config, self.resolved, self.cores)


AnyStudy: TypeAlias = StudyContext | StudySnapshot
