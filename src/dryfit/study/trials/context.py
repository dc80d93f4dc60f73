"""What is known of a study: by the process that runs it, and by one that only reads it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dryfit.config.schema import StudyConfig
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.train import ResolveResult
from dryfit.runtime.machine.node import NodeFacts
from dryfit.search.space.space import Space
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import Ledger
from dryfit.store.replay import StudyState
from dryfit.study.resources.trial_devices import Parallelism, job_of_trials, most_on_node, parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyStudy:
    """A study, its data resolved, and the nodes that its trials may use, by name."""

    config: StudyConfig
    layout: StudyLayout
    state: StudyState
    resolved: ResolveResult
    nodes: Mapping[str, NodeFacts]

    @property
    def parallelism(self) -> Parallelism:
        """How many trials may run side by side, as far as cores go."""
        return parallelism(self.config, self.resolved.device, self.nodes.values())

    def most_on(self, node: str) -> int:
        """How many of them may run on one node."""
        return most_on_node(self.config, self.resolved.device, self.nodes, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyContext(AnyStudy):
    """The study that a session runs; only ``state`` changes meanwhile, with each event of the ledger."""

    space: Space
    ledger: Ledger

    @property
    def trial_job(self) -> Job:
        """The job of a trial's process."""
        return job_of_trials(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot(AnyStudy):
    """A study as its folder has it now, whether it runs or not."""
