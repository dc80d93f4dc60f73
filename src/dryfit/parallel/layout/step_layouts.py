"""How the model of a rehearsed training step is laid out: whole, or as one rank's tensor-parallel shard.

A plan is made in one process. The other ranks are absent there: collectives return tensors of the right shapes, and the
bytes that the rank would send are counted.
"""

from typing import Protocol, final

import torch
from torch import nn

from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.core.sharding.shard_summary import Sent
from dryfit.parallel.layout.layout import whole_gradient_norm
from dryfit.parallel.layout.proved_plans import with_sharded_loss
from dryfit.parallel.ranks.apply import connect, shard
from dryfit.parallel.ranks.check import check_plan, shards_of
from dryfit.parallel.ranks.collectives import AbsentRanks, Ranks
from dryfit.parallel.ranks.counted import CountedRanks
from dryfit.parallel.ranks.gathering import gather
from dryfit.parallel.ranks.norms import gradient_norm
from dryfit.parallel.ranks.sharded_scores import ShardedScores
from dryfit.tasks.base import Task, TaskModel


class StepLayout(Protocol):
    """What a rehearsed step needs to know about the ranks."""

    @property
    def ranks(self) -> int:
        """How many ranks hold the model."""
        ...

    def shard(self, model: TaskModel) -> None:
        """Reduce a whole model to what this rank holds, in place.

        Raises:
            ShardError: The plan is another model's.
        """
        ...

    def connect(self, model: TaskModel) -> None:
        """Make the model compute with the other ranks; its parameters must be those that will be trained."""
        ...

    def task_here(self, task: Task) -> Task:
        """Return the task as this rank trains it."""
        ...

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the 2-norm of the whole model's gradients."""
        ...

    def copy_checkpoint(self, model: TaskModel, optimizer: torch.optim.Optimizer | None) -> None:
        """Copy everything that a checkpoint holds to the host, sharded tensors put together first."""
        ...

    def count(self, *, backward: bool) -> None:
        """Count what is sent from now on as sent in the backward pass, or outside it."""
        ...

    def sent(self) -> Sent:
        """Return what was sent since the last call."""
        ...


@final
class WholeStep:
    """The whole model in one process."""

    ranks = 1

    def shard(self, model: TaskModel) -> None:
        """Do nothing."""

    def connect(self, model: TaskModel) -> None:
        """Do nothing."""

    def task_here(self, task: Task) -> Task:
        """Return the task itself."""
        return task

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm as torch computes it."""
        return whole_gradient_norm(model)

    def copy_checkpoint(self, model: TaskModel, optimizer: torch.optim.Optimizer | None) -> None:
        """Copy model and optimizer state, one tensor after another."""
        for tensor in model.state_dict().values():
            tensor.detach().contiguous().cpu()
        for state in optimizer.state_dict()["state"].values() if optimizer is not None else ():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.detach().cpu()

    def count(self, *, backward: bool) -> None:
        """Do nothing."""

    def sent(self) -> Sent:
        """Return zeros."""
        return Sent()


@final
class RankStep:
    """A rank's tensor-parallel shard.

    Args:
        plan: How the model is sharded.
        ranks: The rank's end of the collectives; None: rank 0 beside absent ranks.
    """

    def __init__(self, plan: ShardPlan, ranks: Ranks | None = None) -> None:
        self._plan = plan
        self._ends = CountedRanks(ranks if ranks is not None else AbsentRanks(0, plan.degree))
        self.ranks = plan.degree

    def shard(self, model: TaskModel) -> None:
        """Replace parameters by the rank's slices."""
        check_plan(model, self._plan)
        shard(model, self._plan, self._ends.rank)

    def connect(self, model: TaskModel) -> None:
        """Hang the plan's collectives on the model's modules and parameters."""
        connect(model, self._plan, self._ends, ShardedScores.in_calls_of(model))

    def task_here(self, task: Task) -> Task:
        """Return the task with its loss computed over the ranks where scores stay sharded."""
        return with_sharded_loss(task, self._plan, self._ends)

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm over the slices of all ranks."""
        return gradient_norm(model, self._plan, self._ends)

    def copy_checkpoint(self, model: TaskModel, optimizer: torch.optim.Optimizer | None) -> None:
        """Gather and copy what is saved, one tensor after another; of a model with adapters these alone."""
        shards, adapted = shards_of(model, self._plan), model.adapted() is not None
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not adapted:
                gather(parameter.detach(), shards[name], self._ends, name).cpu()
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    of_weight = value.shape == parameter.shape
                    (gather(value, shards[name], self._ends, name) if of_weight else value).detach().cpu()

    def count(self, *, backward: bool) -> None:
        """Count by pass."""
        self._ends.backward = backward

    def sent(self) -> Sent:
        """Return the counts and begin anew."""
        sent, self._ends.sent = self._ends.sent, Sent()
        return sent


def step_layout(plan: ShardPlan | None) -> StepLayout:
    """Return the layout of a step by a plan; None: the model is whole."""
    return WholeStep() if plan is None else RankStep(plan)
