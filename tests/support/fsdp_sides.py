"""A trial's model sharded over processes, beside the whole one, in double precision: steps of both, compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dryfit.parallel.fsdp import FsdpLayout, HeldBytes
from dryfit.parallel.layout import ModelRecipe, empty_model, local_shard
from dryfit.parallel.processes import ProcessGroup, RankGroup, run_in_process_group
from dryfit.parallel.prove import InDouble
from dryfit.settings.splits import derive_seed
from dryfit.settings.training_messages import TrainRequest
from dryfit.tasks.base import Batch, MakeBase, Task, TaskModel
from dryfit.tasks.heads import freeze
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.training.batches import read_tokens, trial_task
from dryfit.training.model import build_model
from dryfit.training.optimizer import make_optimizer, optimizer_plan
from dryfit.training.start import start_training
from dryfit.training.step import backward_batch
from trials import ScriptedChannel, Trial, apart


@dataclass(frozen=True)
class Sides:
    """One model twice, on one process of several."""

    task: Task
    batches: list[Batch]
    whole: TaskModel
    sharded: TaskModel
    layout: FsdpLayout
    request: TrainRequest


def on_ranks(trial: Trial, job: Callable[[Sides], Any], *, steps: int = 3) -> list[Any]:
    """Do something with both models on each process; what each of them found.

    Args:
        trial: Its plan says how many processes.
        job: Done by all of them, in double precision.
        steps: Batches that are made.
    """
    request = trial.request()
    channel = ScriptedChannel(trial.folder / "sides")

    def on_rank(group: ProcessGroup) -> list[Any]:
        plain = start_training(request, channel)
        tokens = read_tokens(request, plain, only=(TRAIN, VALIDATION))
        task = trial_task(request.config, tokens)
        batch, rows = request.plan.effective_batch, tokens.splits[TRAIN]
        made = [task.collate(rows, range(step * batch, (step + 1) * batch)) for step in range(steps)]
        with InDouble():
            sides = _sides(request, task, made, group)
            return group.collect(job(sides))

    def attempt() -> tuple[Any, list[Any]]:
        try:
            return run_in_process_group(request.plan, channel, on_rank), []
        except Exception as error:
            return error, getattr(error, "__notes__", [])

    return apart(attempt)[0]


def _sides(request: TrainRequest, task: Task, batches: list[Batch], group: ProcessGroup) -> Sides:
    assert isinstance(group, RankGroup)
    regularization = request.config.settings.regularization

    def build(make: MakeBase) -> TaskModel:
        return task.model(make, seed=derive_seed(request.config.seed, "head"))

    recipe = ModelRecipe(build, regularization, "cpu")
    layout = FsdpLayout(recipe, group)
    sharded, _ = layout.load(empty_model(recipe))
    freeze(sharded.double(), regularization.freeze_layers)
    layout.connect(sharded)
    return Sides(task, batches, build_model(request, task).double(), sharded, layout, request)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest number where that is over 1."""
    return float((one.detach() - other.detach()).abs().max()) / max(1.0, float(other.detach().abs().max()))


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(sides: Sides) -> dict[str, float]:
    """How far outputs, losses, gradients, their norm and the updated weights are from the whole model's."""
    settings, plan = sides.request.config.settings, optimizer_plan(sides.request.plan)
    models = (sides.sharded.eval(), sides.whole.eval())
    optimizers = [make_optimizer(model, settings.optim.model_copy(update={"eps": 1e-4}), plan) for model in models]
    off: dict[str, float] = dict.fromkeys(("outputs", "loss", "gradients", "norm", "weights"), 0.0)
    for batch in sides.batches:
        inputs = {name: batch[name] for name in sides.task.inputs if name in batch}
        outputs = [model(**inputs) for model in models]
        off["outputs"] = max(off["outputs"], *_each(distance, *outputs))
        here = sides.layout.portions(len(batch["attention_mask"]), sides.request.plan.micro_batch)
        losses = [
            backward_batch(
                model, batch, sides.task, micro_batch=rows, backward=torch.Tensor.backward, autocast=InDouble
            )
            for model, rows in zip(models, (here, sides.request.plan.effective_batch), strict=True)
        ]
        off["loss"] = max(off["loss"], distance(sides.layout.batch_loss(losses[0]), losses[1]))
        off["gradients"] = max(off["gradients"], _of_gradients(*models))
        norm = nn.utils.get_total_norm([one.grad for one in sides.whole.parameters() if one.grad is not None])
        off["norm"] = max(off["norm"], distance(sides.layout.gradient_norm(sides.sharded), norm))
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(sides.sharded.parameters(), sides.whole.parameters(), strict=True)
        off["weights"] = max(off["weights"], *(distance(whole_of(mine), theirs) for mine, theirs in pairs))
    return off


def _of_gradients(sharded: nn.Module, whole: nn.Module) -> float:
    """Relative to the largest gradient of all."""
    grads = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    mine = {name: whole_of(one.grad) for name, one in sharded.named_parameters() if one.grad is not None}
    assert mine.keys() == grads.keys()
    return max(float((mine[name] - grads[name]).abs().max()) for name in grads) / largest


def _each(found: Callable[..., float], one: Any, other: Any) -> Iterator[float]:
    pairs = [(one, other)] if isinstance(one, torch.Tensor) else zip(one, other, strict=True)
    return (found(*pair) for pair in pairs)


def held(sides: Sides) -> tuple[HeldBytes, list[nn.Parameter]]:
    """What this process really holds after a step, and the parameters that it is of."""
    plan = optimizer_plan(sides.request.plan)
    optimizer = make_optimizer(sides.sharded, sides.request.config.settings.optim, plan)
    batch = sides.batches[0]
    here = sides.layout.portions(len(batch["attention_mask"]), sides.request.plan.micro_batch)
    backward_batch(
        sides.sharded, batch, sides.task, micro_batch=here, backward=torch.Tensor.backward, autocast=InDouble
    )
    optimizer.step()
    weights = [local_shard(one) for one in sides.sharded.parameters()]
    gradients = [local_shard(one.grad) for one in sides.sharded.parameters() if one.grad is not None]
    moments = [
        local_shard(one) for state in optimizer.state.values() for one in state.values() if isinstance(one, DTensor)
    ]
    found = HeldBytes(*(_storages(tensors) for tensors in (weights, gradients, moments)))
    sizes = [nn.Parameter(one.detach().to("meta"), one.requires_grad) for one in sides.whole.parameters()]
    return found, sizes


def _storages(tensors: list[torch.Tensor]) -> int:
    """Bytes of all memory that tensors look at."""
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())
