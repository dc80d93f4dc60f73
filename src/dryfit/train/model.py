"""Build a trial's model: pretrained parts, head, frozen layers, and activation checkpointing."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError
from dryfit.core.jobs.train import TrainRequest
from dryfit.core.seeds import derive_seed
from dryfit.core.settings.execution import DeviceKind, ExecutionPlan
from dryfit.core.settings.tables import ModelSettings, RegularizationSettings
from dryfit.core.settings.weight_formats import WeightFormat
from dryfit.core.wire import write_text_atomic
from dryfit.meta.files.source import model_folder
from dryfit.meta.loading.filling import materialise
from dryfit.meta.loading.frozen_weights import fill_frozen
from dryfit.meta.loading.matching import LoadOptions
from dryfit.meta.loading.pretrained import Kind, class_cannot_checkpoint, empty_stack
from dryfit.parallel.layout.layout import Layout, OneProcess
from dryfit.parallel.layout.model_slices import ModelRecipe
from dryfit.parallel.layout.processes import SINGLE_PROCESS, ProcessGroup
from dryfit.parallel.layout.sharded_model import sharded_model
from dryfit.tasks.base import MakeBase, Task, TaskModel
from dryfit.tasks.heads import freeze
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION
from dryfit.tasks.tokens.token_set import Tokens
from dryfit.train.activation_offload import cannot_offload_activations, offload_layer_inputs
from dryfit.train.batches import epoch_size
from dryfit.train.chunked_loss import as_planned
from dryfit.train.data import trial_task
from dryfit.train.run import ALONE, FixedLength, FoldPosition, TrialParts, fold_seed


def trial_parts(
    request: TrainRequest,
    channel: ChildChannel,
    tokens: Tokens,
    *,
    length: FixedLength | None = None,
    position: FoldPosition = ALONE,
    group: ProcessGroup = SINGLE_PROCESS,
) -> TrialParts:
    """Build the model, and put together what one training run is made of.

    Args:
        request: What to learn, how to run it and where its files lie.
        channel: How to report, and to hear verdicts and stop requests.
        tokens: The rows, of which train and validation are those of the position.
        length: None: all epochs, validated on the way.
        position: Which of the trial's folds is trained.
        group: The processes that train it.
    """
    channel.beat()
    if position.number:
        seed = fold_seed(request.config.seed, position.number)
        request = request.model_copy(update={"config": request.config.model_copy(update={"seed": seed})})
    task = trial_task(request.config, tokens)
    model, layout = _laid_out(request, task, group)
    task = as_planned(layout.task_here(task), model, request.plan, request.config.settings.train.precision)
    channel.beat()
    return TrialParts(
        request=request,
        channel=channel,
        model=model,
        task=task,
        train=tokens.splits[TRAIN],
        validation=tokens.splits[VALIDATION],
        tokenizer_folders={part: model_folder(source) for part, source in task.sources().items()},
        epoch_rows=epoch_size(tokens.splits[TRAIN], task),
        length=length,
        position=position,
        layout=layout,
    )


def _laid_out(request: TrainRequest, task: Task, group: ProcessGroup) -> tuple[TaskModel, Layout]:
    """Return the trial's model, or this process's shard of it, ready to train, and how it lies on the processes.

    Raises:
        ConfigError: It cannot be sharded so.
        ShardError: The shard plan is wrong, or the ranks are not alike.
    """
    if group.size == 1:
        return build_model(request, task), OneProcess()

    def build(make: MakeBase) -> TaskModel:
        model = task.model(make, seed=derive_seed(request.config.seed, "head"))
        _recompute(model, request.plan)
        return model

    recipe = ModelRecipe(build, request.config.settings.regularization, device_of(request.plan))
    model, report, layout = sharded_model(recipe, task, group, request.plan, Path(request.cache_dir))
    if group.rank == 0:
        write_text_atomic(Path(request.load_report), report.model_dump_json(), durable=False)
    task.check_model(model)
    return model, layout


def device_of(plan: ExecutionPlan) -> str:
    """Return the torch device of a trial."""
    return "cuda" if plan.device is DeviceKind.CUDA else "cpu"


def _recompute(model: TaskModel, plan: ExecutionPlan) -> None:
    reason = cannot_offload_activations(plan.device, processes=plan.processes) if plan.offload_activations else None
    if reason is not None:
        raise ConfigError(
            "checking execution.offload_activations = true",
            reason,
            allowed="true with a CUDA device and one process a trial",
            hint="leave it unset: it is then chosen where it helps",
        )
    if plan.checkpointing:
        for part in model.pretrained().values():
            enable_checkpointing(part, reentrant=plan.reentrant)
    if plan.offload_activations:
        offload_layer_inputs(model)


def build_model(request: TrainRequest, task: Task) -> TaskModel:
    """Build the whole model on its device, with a seeded head and frozen layers, and write the load report."""
    regularization = request.config.settings.regularization
    device = device_of(request.plan)
    model = task.model(_pretrained(regularization, device), seed=derive_seed(request.config.seed, "head"))
    _recompute(model, request.plan)
    report = materialise(model, device=device, missing=model.drawn)
    write_text_atomic(Path(request.load_report), report.model_dump_json(), durable=False)
    freeze(model, regularization.freeze_layers, dropout=regularization.frozen_dropout)
    task.check_model(model)
    return model


def _pretrained(regularization: RegularizationSettings, device: str) -> MakeBase:
    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del part
        model = empty_stack(source, kind, regularization, frozen)
        fill_frozen(model, source, kind, frozen, LoadOptions(torch.device(device)))
        return model

    return make


def enable_checkpointing(encoder: PreTrainedModel, *, reentrant: bool) -> None:
    """Recompute each layer's activations in the backward pass, with the same random state, instead of keeping them.

    Args:
        encoder: Changed in place; may still be without data.
        reentrant: By autograd within autograd, as older code does it. The first layer's input must then require a
            gradient, so the embeddings' output is made to, frozen or not.

    Raises:
        ConfigError: The encoder has no activation checkpointing.
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
