"""Tensor parallelism: a rank's shard of a trial's model, trained with the other ranks' and saved whole.

Its gradient norm is that of the whole model; a checkpoint has whole tensors, put together of the ranks' slices.
"""

from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import nn

from dryfit.parallel.apply import (
    check_plan,
    check_ranks,
    connect,
    mark_sharded,
    shard,
    shards_of,
    slice_tensor,
    slices_on_rank,
)
from dryfit.parallel.collectives import Ranks
from dryfit.parallel.layout import AllRows, Gathered, ModelRecipe, Sharded, ShardedLayout, filled_slices, restore_slices
from dryfit.parallel.processes import RankGroup
from dryfit.parallel.proved_plans import with_sharded_loss
from dryfit.parallel.vocabulary_loss import ShardedScores, VocabularyLoss
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.sharding import ParameterShard, ShardPlan
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.lm_loss import LossesInChunks


def gather(local: torch.Tensor, shard: ParameterShard, ranks: Ranks, what: str) -> torch.Tensor:
    """Return a whole parameter, or a tensor of its shape such as an optimizer's moment; every rank calls it."""
    if shard.dim is None:
        return local
    held = ranks.all_gather(local, what)
    if len(shard.blocks) == 1:
        return torch.cat(held, shard.dim)
    sizes = [block // ranks.degree for block in shard.blocks]
    blocks = zip(*(one.split(sizes, shard.dim) for one in held), strict=True)
    return torch.cat([part for block in blocks for part in block], shard.dim)


def gradient_norm(module: nn.Module, plan: ShardPlan, ranks: Ranks) -> torch.Tensor:
    """Return the 2-norm of the whole model's gradients, the same on each rank; every rank calls it.

    Slices of all ranks count; parameters that every rank holds whole count once, those without a gradient not at all.
    """
    shards = shards_of(module, plan)
    device = next(module.parameters()).device
    of_slices, of_whole = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            wide = torch.promote_types(parameter.grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(parameter.grad, dtype=wide)
            total = of_whole if shards[name].dim is None else of_slices
            total += norm.double().square()
    return (ranks.all_reduce(of_slices, "the gradients' norm") + of_whole).sqrt()


class TensorParallel(AllRows):
    """A rank's part in the steps of a tensor-parallel model, trained or rehearsed.

    Args:
        plan: How the model is sharded.
        ranks: This rank's end of the collectives.
    """

    def __init__(self, plan: ShardPlan, ranks: Ranks) -> None:
        self.plan = plan
        self.ranks = ranks

    def shard(self, model: TaskModel) -> None:
        """Reduce a whole model to what this rank holds, in place.

        Raises:
            ShardError: The plan is another model's.
        """
        check_plan(model, self.plan)
        shard(model, self.plan, self.ranks.rank)

    def connect(self, model: TaskModel) -> None:
        """Make the ranks' models compute together; called once it is known which parameters are trained."""
        scores = ShardedScores.in_calls_of(model)
        connect(model, self.plan, self.ranks, scores)
        if self.plan.scores is not None and isinstance(model, LossesInChunks):
            model.chunk_losses = partial(VocabularyLoss(self.ranks, self.plan.vocabulary).of_chunk, scores)

    def task_here(self, task: Task) -> Task:
        """Return the task with its loss computed over the ranks where scores stay sharded."""
        return with_sharded_loss(task, self.plan, self.ranks)

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm over all ranks' slices, in the gradients' dtype."""
        norm = gradient_norm(model, self.plan, self.ranks)
        return norm.to(next(one.grad.dtype for one in model.parameters() if one.grad is not None))

    def gathered(self, model: TaskModel) -> Gathered:
        """Return what gathers a parameter's slices from all ranks."""
        shards = shards_of(model, self.plan)
        return lambda name, local: gather(local, shards[name], self.ranks, name) if name in shards else local


@final
class TensorParallelLayout(TensorParallel, ShardedLayout):
    """A rank's shard of a tensor-parallel model.

    Args:
        recipe: How the model is made.
        plan: How it is sharded.
        group: This rank among the others.
    """

    def __init__(self, recipe: ModelRecipe, plan: ShardPlan, group: RankGroup) -> None:
        TensorParallel.__init__(self, plan, group.tensors)
        ShardedLayout.__init__(self, recipe, group)

    def load(self, whole: TaskModel) -> tuple[TaskModel, LoadReport]:
        """Load this rank's slices; :meth:`connect` makes them compute with the others.

        Args:
            whole: The whole model, on the meta device.

        Raises:
            LoadError: As for a whole model.
            ConfigError: A part cannot be sliced before it is filled.
        """
        model, report = filled_slices(self.recipe, whole, slices_on_rank(whole, self.plan, self.group.rank))
        mark_sharded(model, self.group.rank, self.plan.degree)
        return model, report

    def connect(self, model: TaskModel) -> None:
        """Make the ranks' models compute together; called once it is known which parameters are trained.

        Raises:
            ShardError: The ranks differ in plan, parameters, modes or random state.
        """
        super().connect(model)
        check_ranks(model, self.plan, self.ranks)

    def sharded(self, model: TaskModel) -> Sharded:
        """Return what slices a whole tensor of a parameter's shape."""
        shards = shards_of(model, self.plan)
        rank, degree = self.group.rank, self.plan.degree
        return lambda name, value: (
            slice_tensor(value, shards[name], rank, degree) if tuple(value.shape) == shards[name].shape else value
        )

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Read this rank's slices; nothing changes unless every tensor has its place."""
        shapes = {name: one.shape for name, one in shards_of(model, self.plan).items()}
        restore_slices(model, folder, slices_on_rank(model, self.plan, self.group.rank), shapes)
