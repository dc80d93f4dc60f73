"""The interface between training and a model's layout on its processes: whole, tensor-parallel or FSDP."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, final

import torch
from torch import nn

from dryfit.meta.loading.matching import LoadOptions
from dryfit.parallel.layout.portions import Portion, portions
from dryfit.parallel.layout.processes import ProcessGroup, SingleProcess
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.saved.saved_model import restore

Gathered = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the whole tensor, given the parameter's name and this process's shard of it."""


class Layout(Protocol):
    """How a trial's model lies on its processes. All of them make the same calls in the same order."""

    @property
    def group(self) -> ProcessGroup:
        """The processes that train the trial."""
        ...

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """Return the rows of a batch that go through the model here; every process makes as many passes."""
        ...

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context for a step's passes that says where their random numbers on a device come from."""
        ...

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a batch's loss, given that of the rows that went through here; the same on each process."""
        ...

    def task_here(self, task: Task) -> Task:
        """Return the task as it is trained and validated here, with outputs as this process's model gives them."""
        ...

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the 2-norm of the whole model's gradients, the same on each rank."""
        ...

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return the whole model on rank 0, for saving; None on the others.

        Where adapters alone are saved, its other weights may be on the meta device.
        """
        ...

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Give the model the weights of a saved whole model, in place.

        Raises:
            LoadError: A weight is missing, has no place or another shape, or the file is damaged.
        """
        ...

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer save and load the whole model's state."""
        ...


class AllRows:
    """All rows of a batch go through the model on each process, with the same random numbers."""

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """Return all rows."""
        return portions(rows, micro_batch)

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Draw from torch's generator, alike on all; regions of a tensor-parallel model have streams of their own."""
        return nullcontext()

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss: each process has computed all of it."""
        return loss


@final
class OneProcess(AllRows):
    """The whole model in this process."""

    def __init__(self) -> None:
        self.group = SingleProcess()

    def task_here(self, task: Task) -> Task:
        """Return the task itself."""
        return task

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm as torch computes it."""
        return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])

    def gathered(self, model: TaskModel) -> Gathered:
        """Return the identity."""
        return lambda _, tensor: tensor

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return the model itself."""
        return model

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Read the saved weights."""
        restore(model, folder, LoadOptions(next(model.parameters()).device))

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: it is the whole model's."""
