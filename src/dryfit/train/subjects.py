"""What is planned, as the parts of a training step: the model without memory, its loss, its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from dryfit.core.plan import PlanSubject
from dryfit.core.settings import DataSettings, LoraSettings, ModelSettings, RegularizationSettings, TrialSettings
from dryfit.meta.catalogue import planning_config
from dryfit.meta.configs import set_dropouts
from dryfit.meta.construction import build
from dryfit.meta.pretrained import STACKS, Kind, make_model, one_stack
from dryfit.tasks.base import Given, MakeBase, Task, TaskModel
from dryfit.tasks.decoder import frozen_in
from dryfit.tasks.heads import freeze
from dryfit.tasks.registry import make_task
from dryfit.train.model import enable_checkpointing
from dryfit.train.optim import OptimizerPlan, make_optimizer


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a training step works on.

    Attributes:
        model: On the meta device.
        task: Gives loss sum and normaliser, and the sizes of a batch.
        optimizer: Makes the optimizer once the model is on its device.
    """

    model: TaskModel
    task: Task
    optimizer: Callable[[OptimizerPlan], torch.optim.Optimizer]
    settings: TrialSettings

    def batch_sizes(self, rows: int, length: int) -> dict[str, tuple[int, ...]]:
        """The size of each entry of a batch of so many rows of so many tokens."""
        return self.task.batch_sizes(rows, length, segments=self.model.takes_types)


def subject_task(subject: PlanSubject) -> Task:
    """The task that is planned; nothing is known of its rows."""
    data = DataSettings(num_labels=subject.num_labels, multi_label=subject.multi_label)
    adapted = subject.settings.model_copy(update={"lora": subject.lora or LoraSettings(r=0)})
    return make_task(subject.task, Given(adapted, data))


def step_parts(subject: PlanSubject, *, checkpointing: bool, reentrant: bool) -> StepParts:
    """Build what is planned; nothing takes memory, no weight is read.

    Raises:
        ConfigError: The model is unknown, or has no part that a setting names.
    """
    settings, task = subject.settings, subject_task(subject)
    model = task.model(_planned(settings.regularization))
    if checkpointing:
        for part in model.pretrained().values():
            enable_checkpointing(part, reentrant=reentrant)
    freeze(model, settings.regularization.freeze_layers)
    return StepParts(model, task, partial(make_optimizer, model, settings.optim), settings)


def _planned(regularization: RegularizationSettings) -> MakeBase:
    """Makes models that are known by their config alone."""

    def make(source: ModelSettings, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None) -> PreTrainedModel:
        del part
        config = one_stack(planning_config(source), source, allowed=STACKS[kind])
        set_dropouts(config, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)
        model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code))
        return model if dtype is None else frozen_in(model, dtype)

    return make
