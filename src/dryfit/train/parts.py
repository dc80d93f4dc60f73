"""What one training run is made of, and what it has come to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs import StopReason, TrainRequest
from dryfit.core.trial import MetricPoint
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.tokens import TokenSet


@dataclass(frozen=True, slots=True)
class FixedLength:
    """How long to train where no validation can say which weights are the best.

    Attributes:
        schedule_steps: Length of the learning rate's schedule.
        last_step: The step to stop after; the schedule is left where it then is.
    """

    schedule_steps: int
    last_step: int


@dataclass(frozen=True, slots=True)
class TrialParts:
    """All that one training run is made of.

    Attributes:
        tokenizer_folders: Of each pretrained model, by the folder that keeps it in a saved model's own.
        epoch_rows: Rows of the training split that each epoch trains on.
        length: None: all epochs, validated on the way.
    """

    request: TrainRequest
    channel: ChildChannel
    model: TaskModel
    task: Task
    train: TokenSet
    validation: TokenSet
    tokenizer_folders: Mapping[str, Path]
    epoch_rows: int
    length: FixedLength | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data."""
        return -(-self.epoch_rows // self.request.plan.effective_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        if self.length is not None:
            return self.length.schedule_steps
        return self.steps_per_epoch * self.request.config.settings.train.epochs

    @property
    def last_step(self) -> int:
        """The step that training ends with, unless something ends it before."""
        return self.total_steps if self.length is None else self.length.last_step


@dataclass(slots=True)
class RunState:
    """What a run has come to.

    Attributes:
        points: Validations so far, those before the checkpoint it went on from included.
        stopped_by: Why it ended before its time.
        step: Optimizer steps done.
    """

    points: tuple[MetricPoint, ...] = ()
    stopped_by: StopReason | None = None
    step: int = 0
