"""A trial's model cut over the processes that train it: built from slices, saved whole."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.tables import RegularizationSettings
from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.parallel.layout.layout import AllRows
from dryfit.parallel.layout.model_slices import (
    Build,
    change_state,
    empty_model,
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
    """How a rank's model is made.

    Attributes:
        build: Makes the trial's model from pretrained ones.
        regularization: Its dropouts.
        whole: It, without memory.
        plan: How it is cut.
        group: This rank among the others.
        device: Where it lies.
    """

    build: Build
    regularization: RegularizationSettings
    whole: TaskModel
    plan: ShardPlan
    group: RankGroup
    device: str

    def filled(self) -> tuple[TaskModel, LoadReport]:
        """This rank's slices of the model: pretrained ones read from their files, the others drawn whole and cut.

        It does not compute with the other ranks yet: see :meth:`connected`.

        Raises:
            LoadError: As for a whole model.
            ConfigError: A part cannot be cut before it is filled.
        """
        parts = slices_on_rank(self.whole, self.plan, self.group.rank)
        model, report = filled_slices(self.build, self.whole, parts, self.regularization, self.device)
        mark_sharded(model, self.group.rank, self.plan.degree)
        return model, report

    def connected(self, model: TaskModel) -> "TensorParallelLayout":
        """Make the ranks' models compute together; it must be known which parameters are trained.

        Raises:
            ShardError: The ranks are not alike.
        """
        connect(model, self.plan, self.group.tensors, ShardedScores.in_calls_of(model))
        check_ranks(model, self.plan, self.group.tensors)
        return TensorParallelLayout(self)


@final
class TensorParallelLayout(AllRows):
    """A rank's part of a cut model that computes with the others.

    Args:
        cutting: How it was made.
    """

    def __init__(self, cutting: TensorParallelBuilder) -> None:
        self._cutting = cutting
        self.group = cutting.group

    def task_here(self, task: Task) -> Task:
        """With its loss over the ranks where scores stay cut."""
        return with_sharded_loss(task, self._cutting.plan, self.group.tensors)

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Of all slices, in the gradients' own number format."""
        norm = gradient_norm(model, self._cutting.plan, self.group.tensors)
        return norm.to(next(one.grad.dtype for one in model.parameters() if one.grad is not None))

    def whole(self, model: TaskModel) -> TaskModel | None:
        """A model of its own on the CPU, put together one tensor at a time."""
        shards = shards_of(model, self._cutting.plan)

        def gathered(name: str, local: torch.Tensor) -> torch.Tensor:
            return gather(local, shards[name], self.group.tensors, name) if name in shards else local

        making = self._cutting
        empty = partial(empty_model, making.build, making.regularization)
        return whole_model(model, empty, gathered, keep=self.group.rank == 0)

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Each rank reads its slices; nothing changes unless every tensor has its place."""
        shards = shards_of(model, self._cutting.plan)

        def shape_of(name: str, local: torch.Tensor) -> tuple[int, ...]:
            return shards[name].shape if name in shards else tuple(local.shape)

        restore_slices(model, folder, slices_on_rank(model, self._cutting.plan, self.group.rank), shape_of)

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Moments and all else that has a parameter's shape are put together when saved, and cut when loaded."""
        shards = shards_of(model, self._cutting.plan)
        by_id = {id(parameter): shards[name] for name, parameter in model.named_parameters()}
        order = [one for group in optimizer.param_groups for one in group["params"]]
        degree, group = self._cutting.plan.degree, self.group

        def gathered(parameter: nn.Parameter, value: Any) -> Any:
            shard = by_id[id(parameter)]
            if not _is_of(value, shard.local_shape(degree), shard):
                return value
            whole = gather(value, shard, group.tensors, "the optimizer's state")
            return value if group.rank else whole.cpu()

        def cut(parameter: nn.Parameter, value: Any) -> Any:
            shard = by_id[id(parameter)]
            part = slice_on_rank(shard, group.rank, degree)
            return part.of(value) if part is not None and _is_of(value, shard.shape, shard) else value

        optimizer.register_state_dict_post_hook(lambda _, state: change_state(state, order, gathered))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: change_state(state, order, cut))


def _is_of(value: Any, shape: tuple[int, ...], shard: ParameterShard) -> bool:
    """Whether something in an optimizer's state goes element by element with a parameter that is cut."""
    return shard.dim is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == shape
