"""Tensor parallelism: build a rank's shard of a trial's model, train it with the other ranks, save it whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.parallel.layout.layout import AllRows
from dryfit.parallel.layout.model_slices import (
    ModelRecipe,
    change_state,
    filled_slices,
    restore_slices,
    whole_model,
)
from dryfit.parallel.layout.processes import RankGroup
from dryfit.parallel.layout.proved_plans import with_sharded_loss
from dryfit.parallel.ranks.apply import check_ranks, connect, mark_sharded, slice_on_rank, slices_on_rank
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.ranks.gathering import gather
from dryfit.parallel.ranks.norms import gradient_norm
from dryfit.parallel.ranks.sharded_scores import ShardedScores
from dryfit.tasks.base import Task, TaskModel


@dataclass(frozen=True, slots=True)
class TensorParallelBuilder:
    """Builds a rank's shard of a trial's model.

    Attributes:
        recipe: How the model is made.
        whole: The whole model, on the meta device.
        plan: How it is sharded.
        group: This rank among the others.
    """

    recipe: ModelRecipe
    whole: TaskModel
    plan: ShardPlan
    group: RankGroup

    def filled(self) -> tuple[TaskModel, LoadReport]:
        """Load this rank's slices; :meth:`connected` makes them compute with the others.

        Raises:
            LoadError: As for a whole model.
            ConfigError: A part cannot be sliced before it is filled.
        """
        parts = slices_on_rank(self.whole, self.plan, self.group.rank)
        model, report = filled_slices(self.recipe, self.whole, parts)
        mark_sharded(model, self.group.rank, self.plan.degree)
        return model, report

    def connected(self, model: TaskModel) -> "TensorParallelLayout":
        """Make the ranks' models compute together; called once it is known which parameters are trained.

        Raises:
            ShardError: The ranks differ in plan, parameters, modes or random state.
        """
        connect(model, self.plan, self.group.tensors, ShardedScores.in_calls_of(model))
        check_ranks(model, self.plan, self.group.tensors)
        return TensorParallelLayout(self)


@final
class TensorParallelLayout(AllRows):
    """A rank's shard of a tensor-parallel model.

    Args:
        builder: What the shard was built with.
    """

    def __init__(self, builder: TensorParallelBuilder) -> None:
        self._recipe = builder.recipe
        self._plan = builder.plan
        self.group = builder.group

    def task_here(self, task: Task) -> Task:
        """Return the task with its loss computed over the ranks where scores stay sharded."""
        return with_sharded_loss(task, self._plan, self.group.tensors)

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm over all ranks' slices, in the gradients' dtype."""
        norm = gradient_norm(model, self._plan, self.group.tensors)
        return norm.to(next(one.grad.dtype for one in model.parameters() if one.grad is not None))

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return a copy on the CPU, gathered one tensor at a time."""
        shards = shards_of(model, self._plan)

        def gathered(name: str, local: torch.Tensor) -> torch.Tensor:
            return gather(local, shards[name], self.group.tensors, name) if name in shards else local

        return whole_model(model, self._recipe, gathered, keep=self.group.rank == 0)

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Read this rank's slices; nothing changes unless every tensor has its place."""
        shards = shards_of(model, self._plan)

        def shape_of(name: str, local: torch.Tensor) -> tuple[int, ...]:
            return shards[name].shape if name in shards else tuple(local.shape)

        restore_slices(model, folder, slices_on_rank(model, self._plan, self.group.rank), shape_of)

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Gather moments, and whatever else has a parameter's shape, on saving; slice them on loading."""
        shards = shards_of(model, self._plan)
        by_id = {id(parameter): shards[name] for name, parameter in model.named_parameters()}
        order = [one for group in optimizer.param_groups for one in group["params"]]
        degree, group = self._plan.degree, self.group

        def gathered(parameter: nn.Parameter, value: Any) -> Any:
            shard = by_id[id(parameter)]
            if not _is_of(value, shard.local_shape(degree), shard):
                return value
            whole = gather(value, shard, group.tensors, "the optimizer's state")
            return value if group.rank else whole.cpu()

        def sliced(parameter: nn.Parameter, value: Any) -> Any:
            shard = by_id[id(parameter)]
            part = slice_on_rank(shard, group.rank, degree)
            return part.of(value) if part is not None and _is_of(value, shard.shape, shard) else value

        optimizer.register_state_dict_post_hook(lambda _, state: change_state(state, order, gathered))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: change_state(state, order, sliced))


def _is_of(value: Any, shape: tuple[int, ...], shard: ParameterShard) -> bool:
    """Return whether a value of an optimizer's state goes element by element with a sharded parameter."""
    return shard.dim is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == shape
