"""A trial's model: pretrained parts, head, what is frozen, and what is recomputed in backward."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from dryfit.core.errors import ConfigError
from dryfit.core.jobs import TrainRequest
from dryfit.core.seeds import derive_seed
from dryfit.core.settings.execution import DeviceKind, ExecutionPlan
from dryfit.core.settings.tables import ModelSettings, RegularizationSettings
from dryfit.core.wire import write_text_atomic
from dryfit.meta.loading.configs import set_dropouts
from dryfit.meta.loading.filling import materialise
from dryfit.meta.loading.pretrained import Kind, class_cannot_checkpoint, load_stack, pretrained_config
from dryfit.parallel.layout.fsdp import FsdpBuilder
from dryfit.parallel.layout.layout import Layout, OneProcess
from dryfit.parallel.layout.model_slices import empty_model
from dryfit.parallel.layout.processes import ProcessGroup, RankGroup
from dryfit.parallel.layout.proved_plans import PLANS_FOLDER, proved_plan
from dryfit.parallel.layout.tensor_parallel import TensorParallelBuilder
from dryfit.tasks.base import MakeBase, Task, TaskModel
from dryfit.tasks.heads import freeze
from dryfit.tasks.lm.decoder import load_int8


def lay_out(body: TrainRequest, task: Task, group: ProcessGroup) -> tuple[TaskModel, Layout]:
    """The trial's model, or this process's part of it, ready to train, and how it lies on the processes.

    Raises:
        ConfigError: It cannot be divided so.
        ShardError: The plan by which it would be cut is wrong, or the ranks are not alike.
    """
    if not isinstance(group, RankGroup):
        return build_model(body, task), OneProcess()
    regularization = body.config.settings.regularization

    def build(make: MakeBase) -> TaskModel:
        model = task.model(make, seed=derive_seed(body.config.seed, "head"))
        _recompute(model, body.plan)
        return model

    whole, device = empty_model(build, regularization), device_of(body.plan)
    if body.plan.dp > 1:
        making = FsdpBuilder(build, regularization, whole, group, device)
    else:
        folder = Path(body.cache_dir) / PLANS_FOLDER
        # Rank 0 plans and proves, for all.
        plan = group.share(proved_plan(whole, task, group.size, folder).plan if group.rank == 0 else None)
        assert plan is not None
        making = TensorParallelBuilder(build, regularization, whole, plan, group, device)
    model, report = making.filled()
    if group.rank == 0:
        write_text_atomic(Path(body.load_report), report.model_dump_json(), durable=False)
    freeze(model, regularization.freeze_layers)
    layout = making.connected(model)
    task.check_model(model)
    return model, layout


def device_of(plan: ExecutionPlan) -> str:
    """Where a trial's tensors go."""
    return "cuda" if plan.device is DeviceKind.CUDA else "cpu"


def _recompute(model: TaskModel, plan: ExecutionPlan) -> None:
    if plan.checkpointing:
        for part in model.pretrained().values():
            enable_checkpointing(part, reentrant=plan.reentrant)


def build_model(body: TrainRequest, task: Task) -> TaskModel:
    """The trial's model: pretrained, with a seeded head, layers frozen, on its device; its report is written."""
    regularization = body.config.settings.regularization
    device = device_of(body.plan)
    model = task.model(_pretrained(regularization, device), seed=derive_seed(body.config.seed, "head"))
    _recompute(model, body.plan)
    report = materialise(model, device=device, missing=model.drawn)
    write_text_atomic(Path(body.load_report), report.model_dump_json(), durable=False)
    freeze(model, regularization.freeze_layers)
    task.check_model(model)
    return model


def _pretrained(regularization: RegularizationSettings, device: str) -> MakeBase:
    def make(source: ModelSettings, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None) -> PreTrainedModel:
        del part
        dropout, attention_dropout = regularization.dropout, regularization.attention_dropout
        if dtype is torch.int8:
            config = pretrained_config(source, kind)
            set_dropouts(config, dropout=dropout, attention_dropout=attention_dropout)
            return load_int8(source, config, device)
        return load_stack(source, kind, dtype=dtype, dropout=dropout, attention_dropout=attention_dropout)[0]

    return make


def enable_checkpointing(encoder: PreTrainedModel, *, reentrant: bool) -> None:
    """Recompute each layer's activations in backward instead of keeping them; the random state is the same then.

    Args:
        encoder: Changed in place; may still be without data.
        reentrant: By autograd within autograd, as older code does it: the first layer's input must then require a
            gradient, so the embeddings' output is made to, frozen or not.

    Raises:
        ConfigError: The encoder cannot.
    """
    reason = class_cannot_checkpoint(type(encoder), encoder.config, reentrant=reentrant)
    if reason is not None:
        wish = "reentrant" if reentrant else "checkpointing"
        raise ConfigError(
            f"checking execution.{wish} = true", reason, allowed=f"execution.{wish} = false for this model"
        )
    kwargs = {"use_reentrant": reentrant}
    if hasattr(encoder, "activation_checkpointing_enable"):  # the other name goes with transformers 5.17
        encoder.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    # transformers asks for that gradient in both modes. Where nothing needs it, it keeps frozen layers in the graph.
    encoder.disable_input_require_grads()
    if reentrant:
        encoder.enable_input_require_grads()
