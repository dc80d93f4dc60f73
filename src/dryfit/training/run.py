"""The parts of one training run, its position among a trial's folds, and its state."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from dryfit.parallel.layout import Layout, OneProcess
from dryfit.processes.channel import ChildChannel
from dryfit.settings.splits import derive_seed
from dryfit.settings.tables import DataSettings
from dryfit.settings.training_messages import StopReason, TrainRequest
from dryfit.settings.trial import FoldScore, MetricPoint, mean
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.prepare import Fold, study_folds
from dryfit.tasks.rows import VALIDATION
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
class FoldPosition:
    """The position of a run among its trial's folds.

    Attributes:
        folds: How many there are; 1: the trial trains once, and this is it.
        done: The scores of those before this one.
        reports: How many report numbers each has.
    """

    folds: int = 1
    done: tuple[FoldScore, ...] = ()
    reports: int = 1

    def __str__(self) -> str:
        """Return the words behind a step; empty where the trial trains once."""
        return f" of fold {self.number} of {self.folds}" if self.number else ""

    @classmethod
    def of(cls, request: TrainRequest, done: tuple[FoldScore, ...]) -> Self:
        """Return the position behind the folds that are done."""
        train = request.config.settings.train
        # As many numbers as in all trials of the study, and never fewer than a fold needs.
        reports = max(request.fold_reports, train.epochs * train.evals_per_epoch)
        return cls(request.config.data.folds, done, reports)

    def after(self, score: FoldScore) -> Self:
        """Return the position behind one more fold."""
        return replace(self, done=(*self.done, score))

    def fold(self, data: DataSettings) -> Fold | None:
        """Return the fold that is trained; None: the trial trains once."""
        folds = study_folds(data)
        return folds[len(self.done)] if folds else None

    @property
    def is_complete(self) -> bool:
        """Whether all folds are done."""
        return len(self.done) == self.folds

    @property
    def is_last(self) -> bool:
        """Whether the trial has no fold after this one."""
        return len(self.done) + 1 == self.folds

    @property
    def number(self) -> int:
        """The fold's number from 1; 0 where the trial trains once."""
        return len(self.done) + 1 if self.folds > 1 else 0

    @property
    def split(self) -> str:
        """Name of the rows that it is validated on."""
        return f"fold-{self.number}" if self.number else VALIDATION

    @property
    def steps_before(self) -> int:
        """Optimizer steps of the folds that are done."""
        return sum(fold.steps for fold in self.done)

    def total_steps(self, own: int) -> int:
        """Return the optimizer steps of the whole trial; folds to come are taken to have as many as this one."""
        return self.steps_before + own * (self.folds - len(self.done))

    def reported(self, point: MetricPoint, best: float | None) -> MetricPoint:
        """Return a validation as it is reported to the control process.

        Trials are compared by reports of one number, so a number must mean the same in each. Every fold has as many,
        whatever it needs; its last validation has the last of them, after however many epochs that is. The value is
        the trial's so far: the mean of the folds before and of this one, which stands at its present value, and
        in the end at its best.

        Args:
            point: As it is counted within this run.
            best: The run's best value, where this is its last validation; else None.
        """
        if not self.number:
            return point
        first = len(self.done) * self.reports
        now = point.value if best is None else best
        return replace(
            point,
            n=first + (point.n if best is None else self.reports - 1),
            step=self.steps_before + point.step,
            value=mean([*(fold.value for fold in self.done), now]),
            fold=self.number,
        )


def fold_seed(seed: int, number: int) -> int:
    """Return the seed of one of a trial's folds; they count from 1."""
    return derive_seed(seed, "fold", number)


ALONE = FoldPosition()
"""The trial trains once."""


@dataclass(frozen=True, slots=True)
class TrialParts:
    """The parts of one training run.

    Attributes:
        request: What was asked; with folds the seed in it is the fold's own.
        tokenizer_folders: Of each pretrained model, by the folder that keeps it in a saved model's own.
        epoch_rows: Rows of the training split that each epoch trains on.
        length: None: all epochs, validated on the way.
        position: Its position among the trial's folds.
        layout: How the model lies on the processes that train it.
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
    position: FoldPosition = ALONE
    layout: Layout = field(default_factory=OneProcess)

    @property
    def leads(self) -> bool:
        """Whether this process writes for all that train the trial."""
        return self.layout.group.rank == 0

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
    """The state of a run, counted from its own beginning.

    Attributes:
        points: Validations so far, those before the checkpoint it went on from included.
        stopped_by: Why it ended before its time.
        step: Optimizer steps done.
    """

    points: tuple[MetricPoint, ...] = ()
    stopped_by: StopReason | None = None
    step: int = 0
