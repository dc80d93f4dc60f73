"""How a trial's model lies on the processes that train it, and what follows from that for training and saving it."""

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


class Layout(Protocol):
    """What a process of a trial asks of the others about the model. All make the same calls in the same order."""

    @property
    def group(self) -> ProcessGroup:
        """The processes."""
        ...

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """Which of a batch's rows go through the model here, in this order; as many passes on each process."""
        ...

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Around a step's passes: where their random numbers on a device come from."""
        ...

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """A batch's loss, from that of the rows that went through the model here; the same on each process."""
        ...

    def task_here(self, task: Task) -> Task:
        """The task as it is trained and validated here: with outputs as the model gives them on these processes."""
        ...

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """The 2-norm of the whole model's gradients, the same on each rank."""
        ...

    def whole(self, model: TaskModel) -> TaskModel | None:
        """The model with all that is saved of it in one place: on rank 0; None on the others.

        Where adapters alone are saved, its other weights may be without data.
        """
        ...

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Give the model the weights that were saved of the whole one.

        Raises:
            LoadError: A weight is missing, has no place or another shape, or the file is damaged.
        """
        ...

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's saved state that of the whole model, whatever it is loaded into or taken from."""
        ...


def whole_gradient_norm(model: nn.Module) -> torch.Tensor:
    """Return the 2-norm of the gradients of a model that is all in this process."""
    return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])


class AllRows:
    """All rows of a batch go through the model on each process, with the same random numbers."""

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """All of them."""
        return portions(rows, micro_batch)

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """From torch's own generator, alike on all; regions of a cut model see to themselves."""
        return nullcontext()

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The same: each process has computed all of it."""
        return loss


@final
class OneProcess(AllRows):
    """All of the model is here."""

    def __init__(self) -> None:
        self.group = SingleProcess()

    def task_here(self, task: Task) -> Task:
        """The task itself."""
        return task

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm as torch computes it."""
        return whole_gradient_norm(model)

    def whole(self, model: TaskModel) -> TaskModel | None:
        """The model itself."""
        return model

    def restore(self, model: TaskModel, folder: Path) -> None:
        """In place."""
        restore(model, folder, LoadOptions(next(model.parameters()).device))

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """It is."""
