"""Private methods of transformers' Trainer, under public names."""

import inspect
from abc import abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import torch
from torch import nn
from transformers import Trainer

from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # refusing a checkpoint that lacks weights; until: the Trainer writes and reads its state by public methods
    "transformers.Trainer._load_from_checkpoint",
    # telling a torn checkpoint from other faults; until: the Trainer writes and reads its state by public
    # methods
    "transformers.Trainer._load_optimizer_and_scheduler",
    "transformers.Trainer._load_scaler",
    "transformers.Trainer._load_rng_state",
    # writing a checkpoint at a step of ours; until: the Trainer writes and reads its state by public methods
    "transformers.Trainer._save_optimizer_and_scheduler",
    "transformers.Trainer._save_scaler",
    "transformers.Trainer._save_rng_state",
    # looking at the norm before gradients are changed; until: the Trainer asks a callback for the norm before
    # the optimizer's step
    "transformers.Trainer._clip_grad_norm",
    "transformers.Trainer._get_grad_norm",
)


class StateTrainer(Trainer):
    """A Trainer whose state is read and written, and whose gradients are clipped, by public methods."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Give the model the weights of a checkpoint."""

    @abstractmethod
    def reading(self, folder: str | None) -> AbstractContextManager[object]:
        """What is around each reading of a checkpoint's file."""

    @abstractmethod
    def clip(self, model: nn.Module, most: float | None) -> float:
        """Clip the gradients; None: only look at them. Returns their norm as it was."""

    def save_step_state(self, folder: Path) -> None:
        """Write the state of the optimizer, the schedule, the scaler and the random generators."""
        self._save_optimizer_and_scheduler(str(folder))
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.load_weights(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with self.reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self.reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self.clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> float:
        return self.clip(model, None) if grad_norm is None else float(grad_norm)


def load_trained(trainer: Trainer, folder: Path) -> None:
    """Give a Trainer that is not to be trained any more the weights of a checkpoint."""
    trainer._load_from_checkpoint(str(folder))


_CALLED: Final = {
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_scaler": ["self", "checkpoint"],
    "_load_rng_state": ["self", "checkpoint"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
}
"""What is overridden here, with its parameters: were it no longer called, what it does would be left out unseen."""


def _misbehaves() -> str:
    methods = [inspect.unwrap(method) for method in vars(Trainer).values() if inspect.isfunction(method)]
    called = {name for method in methods for name in method.__code__.co_names}
    for name, parameters in _CALLED.items():
        if name not in called:
            return f"no method of transformers.Trainer calls {name} any more"
        found = list(inspect.signature(getattr(Trainer, name)).parameters)
        if found != parameters:
            return f"transformers.Trainer.{name} takes {', '.join(found)}, not {', '.join(parameters)}"
    return ""


TRAINER: Final = PrivateNames("transformers", NAMES, _misbehaves)
