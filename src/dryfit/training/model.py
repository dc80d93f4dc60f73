"""A trial's model: pretrained parts, head, frozen layers, checkpointing, compilation, chunked loss."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dryfit.meta.checkpoint_files import model_folder
from dryfit.meta.filling import materialise
from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import Kind, class_cannot_checkpoint, empty_stack, fill_frozen
from dryfit.parallel.fsdp import sharded_model
from dryfit.parallel.layout import Layout, ModelRecipe, OneProcess
from dryfit.parallel.processes import SINGLE_PROCESS, ProcessGroup
from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import Precision
from dryfit.settings.errors import ConfigError, DryfitError
from dryfit.settings.execution import ExecutionPlan, WeightFormat
from dryfit.settings.files import write_text_atomic
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.splits import derive_seed
from dryfit.settings.tables import ModelSettings, RegularizationSettings
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.wire import Note
from dryfit.tasks.base import MakeBase, Task, TaskModel
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.heads import freeze
from dryfit.tasks.lm_loss import cannot_chunk, head_alone, over_tokens, scores_differ
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.tokens import Tokens
from dryfit.training.batches import epoch_size, trial_task
from dryfit.training.run import ALONE, FixedLength, FoldPosition, TrialParts, fold_seed

# Keep what checkpointed layers are recomputed from, their inputs, in host memory until the backward pass.
#
# transformers has the same as ``activation_checkpointing_enable(offload=True)`` from some version of 5 on. Up to 5.23
# it asks for pinned memory wherever it runs, and so fails on a machine without an accelerator, where plans are made
# and tests run. To be replaced by it when it does not.


def cannot_offload_activations(device: DeviceKind, *, processes: int = 1) -> str | None:
    """Return why a trial's activations cannot lie in host memory; None where they can, as far as its model is asked."""
    if processes > 1:
        return "each process of a trial has activations of its own, on its own device"
    return None if device is DeviceKind.CUDA else "on the CPU they lie in host memory already"


def offload_layer_inputs(model: nn.Module) -> list[RemovableHandle]:
    """Copy the tensors that each checkpointed layer is called with to the host, and back when it is recomputed.

    Numbers are copied, so gradients are the same bit for bit. Tensors given by keyword are shared by all layers and
    stay on the device.

    Args:
        model: With activation checkpointing; changed in place.

    Returns:
        What takes the change back.

    Raises:
        ConfigError: None of its layers says that it is checkpointed.
    """
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if layer.gradient_checkpointing]
    if not layers:
        raise ConfigError(
            "keeping activations in host memory",
            f"{type(model).__name__} has no layer that transformers checkpoints by itself",
            allowed="execution.offload_activations = false for this model",
        )
    return [handle for layer in layers for handle in _offloaded(layer)]


def _offloaded(layer: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    running: list[AbstractContextManager[Any]] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        # Inside of the layer, checkpoint's own hooks take every tensor: left to these is what it was called with.
        running.append(save_on_cpu(pin_memory=torch.cuda.is_available()))
        running[-1].__enter__()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop().__exit__(None, None, None)

    return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)


# Whether a trial's loss is computed in chunks of tokens, and the task that does so.


PARTS_OF_WEIGHTS: Final = "with execution.dp over 1 each process holds a part of the weights between two passes"


def costs_time(precision: Precision) -> bool:
    """Whether a loss in chunks takes longer than the whole: in fp16 scores are computed twice."""
    return precision is Precision.FP16


def cannot_chunk_loss(task: Task, model: TaskModel, *, tp: int = 1, dp: int = 1) -> str | None:
    """Why a trial's loss cannot be computed in chunks of tokens; None where it can.

    Args:
        task: The trial's.
        model: Its model, with its adapters, on any device, whole or a rank's; no weight is read.
        tp: Ranks that share its tensors.
        dp: Processes that share its rows.
    """
    if over_tokens(task) is None or not isinstance(model, CausalLm):
        return "its loss is not over the words of a vocabulary"
    if dp > 1:
        return PARTS_OF_WEIGHTS
    if tp > 1 and not head_alone(model.base()):
        # Gradients of other parts may be summed over the ranks by hooks, which would run for a chunk and once more.
        return "with execution.tp over 1 nothing but the head may stand between the layers and the scores"
    return cannot_chunk(model.decoder, model.base())


def loss_in_chunks(task: Task, model: TaskModel) -> Task:
    """Return the task with its loss in chunks.

    Raises:
        ConfigError: The model's scores cannot be computed so.
    """
    reason, over = cannot_chunk_loss(task, model), over_tokens(task)
    if reason is not None or over is None:
        raise _refused(reason or "its loss is not a sum over tokens")
    return over.with_loss_in_chunks()


def as_planned(task: Task, model: TaskModel, plan: ExecutionPlan, precision: Precision) -> Task:
    """Return the task with its loss in chunks where the plan says so; where it is silent, if that costs no time.

    Args:
        task: The trial's.
        model: Its model, with its weights.
        plan: How the trial runs.
        precision: Number format of its forward pass.

    Raises:
        ConfigError: The plan asks for chunks, and the model's scores cannot be computed so.
    """
    if plan.chunked_loss is False or (plan.chunked_loss is None and costs_time(precision)):
        return task
    reason = cannot_chunk_loss(task, model, tp=plan.tp, dp=plan.dp)
    if reason is None:
        assert isinstance(model, CausalLm)
        reason = scores_differ(model.decoder, model.base())
    if reason is None:
        return loss_in_chunks(task, model)
    if plan.chunked_loss:
        raise _refused(reason)
    return task


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        "checking execution.chunked_loss = true", reason, allowed="execution.chunked_loss = false for this trial"
    )


# Compile a trial's layers by ``torch.compile``, and go on without where torch cannot.
#
# What was compiled torch keeps in a folder of the machine (``TORCHINDUCTOR_CACHE_DIR``), and trials that follow find
# it there.


# Random numbers are torch's own: dropout leaves out what it would without being compiled. Compilers run in this
# process: it has no further ones that could outlive it.
_OPTIONS: Final = {"fallback_random": True, "compile_threads": 1}
_SAID_CHARS: Final = 300


@final
class CompiledLayers:
    """The layers of a model, each compiled by itself: those that are alike share their code, whatever a batch's size.

    Only what runs in :meth:`gradients` is compiled code: a validation has too many shapes for what it takes.

    Args:
        model: On its device, ready to train. Its layers are changed in place; names of parameters are not.
        layers: Those of its modules to compile; none: it trains as it is.
        note: Told when they are not compiled any more, and why.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], note: Callable[[str], None]) -> None:
        self._model = model
        self._note = note
        self.on = bool(layers)
        for layer in layers:
            layer.compile(dynamic=True, options=_OPTIONS)
        if layers:
            torch.compiler.set_stance("force_eager")

    def gradients(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute a batch's gradients; where that fails with compiled layers, once more without, and so ever after.

        What torch cannot compile it finds out in the first forward or backward pass of each shape. Whether it was to
        blame, the second try tells: an error of the model's own comes again.

        Args:
            compute: Adds gradients to those of the model, which has none, and returns the loss.

        Raises:
            OutOfMemoryError: At once: it is no fault of the compiler's, and the second try would need more.
            DryfitError: At once: the batch or the model's outputs are wrong.
        """
        if not self.on:
            return compute()
        before = _random_state()
        try:
            with torch.compiler.set_stance("default"):
                return compute()
        except (DryfitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # compilers raise whatever they like
            said = f"{type(error).__name__}: {error}".splitlines()[0][:_SAID_CHARS]
        self.on = False
        for parameter in self._model.parameters():
            parameter.grad = None
        _set_random_state(before)
        loss = compute()
        self._note(f"the layers are not compiled from here on: {said}")
        return loss


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model's pretrained parts, as transformers marks them."""
    return [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]


def compiled_layers(parts: TrialParts) -> CompiledLayers:
    """Compile a run's layers, if its plan says so.

    Not with activations on the host: their hooks stand before and behind each layer, and compiled code has no place
    for them.
    """

    def note(text: str) -> None:
        parts.channel.send(Note(text=text))

    plan, model = parts.request.plan, parts.model
    layers: Sequence[nn.Module] = ()
    if plan.compiled and not plan.offload_activations:
        layers = layers_of(model)
        if not layers:
            note(f"nothing is compiled: {type(model).__name__} has no layers that transformers marks as such")
    return CompiledLayers(model, layers, note)


def _random_state() -> list[torch.Tensor]:
    """Return the states of the generators that a step draws from: the CPU's, and its device's if there is one."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


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
