"""A child as the control process starts it: its job, its limits, its events, and the settings of all children."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dryfit.config.schema import Isolation, StudyConfig
from dryfit.core.failure import Evidence
from dryfit.core.jobs.child import JOBS, ChildResult, JobRow
from dryfit.core.jobs.job import Job, JobRequest
from dryfit.core.settings.task_facts import TASK_MODULES
from dryfit.core.sharding.device_groups import HERE, cpu_of
from dryfit.core.user_code import script_imports
from dryfit.core.wire import Message
from dryfit.runtime.children.protocol import SERVE

PRELOAD = (
    "dryfit.jobs.resolve",
    *TASK_MODULES,
    SERVE,  # RESOLVE reads the data meanwhile
    "sklearn.metrics",
    "dryfit.tasks.baselines.compute",
    SERVE,  # and BASELINES takes its time; a third of the imports is still to come
    "dryfit.jobs.train",
    "dryfit.jobs.final",
    "dryfit.jobs.plan",
    "dryfit.jobs.batch_check",
)
"""Modules the fork server imports once for all children, in this order."""

OBJECTIVE_PRELOAD = ("dryfit.jobs.own.objective",)
"""The same where children call a function of the user's own: no torch, so the server is small and there at once."""

TRAINER_PRELOAD = (*OBJECTIVE_PRELOAD, "dryfit.jobs.own.trainer")
"""The same where that function makes a Trainer: what every Trainer needs."""

SCRIPT_PRELOAD = ("dryfit.jobs.script.run",)
"""The same where children run the user's own script."""

_WARM = {"transformers": "dryfit.jobs.script.trainers", "torch": "torch"}
_ON_TRANSFORMERS = frozenset({"transformers", "trl", "sentence_transformers", "setfit", "span_marker", "peft"})
_ON_TORCH = frozenset({"torch", "lightning", "pytorch_lightning", "timm", "torchvision", "accelerate"})
"""What scripts import that is slow, and is therefore imported once."""


def preload_of(config: StudyConfig) -> tuple[str, ...]:
    """Return the modules that the fork server of a study imports."""
    own = config.function
    if own is None:
        return PRELOAD
    if config.script is None:
        return (*(OBJECTIVE_PRELOAD if config.trainer is None else TRAINER_PRELOAD), *own.preload)
    imported = script_imports(config.script.command, Path(config.script.folder))
    slow = "transformers" if imported & _ON_TRANSFORMERS else "torch" if imported & _ON_TORCH else None
    return (*SCRIPT_PRELOAD, *((_WARM[slow],) if slow is not None else ()), *own.preload)


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """How long a child may take; time in which the control process itself did not run is not counted.

    Attributes:
        start_s: Until its first line.
        hang_s: Without a heartbeat.
        hang_learned: Whether a shorter limit is learned from the child's own signs of life
            (:mod:`dryfit.runtime.children.attempt`).
        total_s: From its first line to its end; None: no limit.
        stop_grace_s: To write a checkpoint after a request to stop.
    """

    start_s: float
    hang_s: float
    total_s: float | None
    stop_grace_s: float
    hang_learned: bool = False


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child to start.

    Attributes:
        key: Name of the child, unique among those that run.
        folder: Its folder for messages and files; made if absent.
        body: Its job.
        limits: How long it may take.
        place: Where it runs, which names its node too (:mod:`dryfit.core.sharding.device_groups`).
        planned_bytes: The memory that it is planned to take of each of its devices; None: not known.
    """

    key: str
    folder: Path
    body: JobRequest[Any]
    limits: ChildLimits
    place: str = cpu_of(HERE)
    planned_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ChildMessage:
    """A message of a child, and the node that it is from."""

    key: str
    message: Message
    node: str = HERE


@dataclass(frozen=True, slots=True)
class ChildExited:
    """The end of a child; its messages came before.

    Attributes:
        result: Its result; None if it left none.
        evidence: The evidence of how it ended.
        node: The node that it ran on.
    """

    key: str
    result: ChildResult | None
    evidence: Evidence
    node: str = HERE


ChildEvent: TypeAlias = ChildMessage | ChildExited


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """How one control process runs its children.

    Attributes:
        marker: The study's (:func:`~dryfit.runtime.children.processes.marker_of`); every process carries it in its
            environment (see :mod:`dryfit.runtime.children.processes`).
        wakeup_fifo: Path of the FIFO that children write to after each message; None: their files are polled.
        isolation: How children are made.
        server_log: Where the fork server's output goes.
        preload: Modules the fork server imports.
        environment: Variables added to every child's environment.
        jobs: The jobs that they do.
        server_start_s: How long the fork server may take to import.
        probe: Adds evidence from outside the child, such as the state of its device; takes the child's key.
    """

    marker: str
    wakeup_fifo: Path | None
    isolation: Isolation
    server_log: Path
    preload: tuple[str, ...] = PRELOAD
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    jobs: Mapping[Job, JobRow] = field(default_factory=lambda: JOBS)
    server_start_s: float = 120.0
    probe: Callable[[str, Evidence], Evidence] = lambda _key, evidence: evidence
