"""Build the parts of a training step from a planning subject: model on the meta device, loss, optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from dryfit.core.settings.execution import PlanSubject
from dryfit.core.settings.tables import DataSettings, LoraSettings, ModelSettings, RegularizationSettings, TrialSettings
from dryfit.core.settings.weight_formats import WeightFormat
from dryfit.memory.tracing import quantised_kernels
from dryfit.meta.construction.construction import build
from dryfit.meta.loading.catalogue import planning_config
from dryfit.meta.loading.configs import check_stored_format, set_dropouts
from dryfit.meta.loading.frozen_weights import empty_frozen
from dryfit.meta.loading.pretrained import STACKS, Kind, make_model, one_stack
from dryfit.parallel.layout.layout import OneProcess
from dryfit.parallel.layout.tensor_parallel import TensorParallel
from dryfit.tasks.base import MakeBase, Task, TaskContext, TaskModel
from dryfit.tasks.heads import freeze
from dryfit.tasks.registry import make_task
from dryfit.train.chunked_loss import cannot_chunk_loss, loss_in_chunks
from dryfit.train.model import enable_checkpointing
from dryfit.train.optim.optimizer import OptimizerPlan, make_optimizer


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a training step.

    Attributes:
        model: The model, on the meta device.
        task: Gives loss sum and normaliser, and the sizes of a batch.
        optimizer: Makes the optimizer once the model is on its device.
        layout: How the model lies on its ranks.
    """

    model: TaskModel
    task: Task
    optimizer: Callable[[OptimizerPlan], torch.optim.Optimizer]
    settings: TrialSettings
    layout: OneProcess | TensorParallel = field(default_factory=OneProcess)

    def connected(self) -> "StepParts":
        """Make the model compute with the other ranks; its parameters must be those that will be trained."""
        if isinstance(self.layout, TensorParallel):
            self.layout.connect(self.model)
        return replace(self, task=self.layout.task_here(self.task))

    def batch_sizes(self, rows: int, length: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each entry of a batch."""
        return self.task.batch_sizes(rows, length, segments=self.model.takes_types)


def subject_task(subject: PlanSubject) -> Task:
    """Return a subject's task, without knowledge of its rows."""
    data = DataSettings(num_labels=subject.num_labels, multi_label=subject.multi_label)
    adapted = subject.settings.model_copy(update={"lora": subject.lora or LoraSettings(r=0)})
    return make_task(subject.task, TaskContext(adapted, data))


def whole_model(subject: PlanSubject) -> tuple[TaskModel, Task]:
    """Return a subject's whole model, on the meta device, and its task.

    Raises:
        ConfigError: The model is unknown.
    """
    task = subject_task(subject)
    return task.model(_planned(subject.settings.regularization)), task


def step_parts(
    subject: PlanSubject,
    *,
    checkpointing: bool,
    reentrant: bool,
    chunked_loss: bool = False,
    layout: OneProcess | TensorParallel | None = None,
) -> StepParts:
    """Build the parts of a subject's step, without memory or reading weights.

    Args:
        subject: What is trained.
        checkpointing: Whether activations are recomputed.
        reentrant: Whether by reentrant autograd.
        chunked_loss: Whether the loss is computed in chunks of tokens.
        layout: Says which part of the model this rank holds; None: all of it.

    Raises:
        ConfigError: The model is unknown, or has no part that a setting names.
        ShardError: The plan is another model's.
    """
    settings = subject.settings
    model, task = whole_model(subject)
    tp = layout.plan.degree if isinstance(layout, TensorParallel) else 1
    if chunked_loss and (tp == 1 or cannot_chunk_loss(task, model, tp=tp) is None):
        task = loss_in_chunks(task, model)
    if checkpointing:
        for part in model.pretrained().values():
            enable_checkpointing(part, reentrant=reentrant)
    freeze(model, settings.regularization.freeze_layers, dropout=settings.regularization.frozen_dropout)
    if isinstance(layout, TensorParallel):
        layout.shard(model)
    return StepParts(model, task, partial(make_optimizer, model, settings.optim), settings, layout or OneProcess())


def _planned(regularization: RegularizationSettings) -> MakeBase:
    """Return a maker of models from their configs alone."""

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del part
        config = one_stack(planning_config(source), source, allowed=STACKS[kind])
        check_stored_format(config, source, frozen)
        set_dropouts(config, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)
        model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code))
        if frozen is None:
            return model
        empty_frozen(model, frozen)
        if frozen.quantised:
            quantised_kernels.install()
        return model

    return make
