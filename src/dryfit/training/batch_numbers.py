"""Random numbers that are drawn while batches are made, by masking or augmentation, over a stop inside an epoch.

A Trainer's checkpoint has the states of the generators at the end of its step. The batch of the next step was made
before that, as accelerate reads one batch ahead (``DataLoaderShard.__iter__``). An attempt that goes on makes it once
more, by other numbers, and all that follows is drawn by others too. So the states from before that batch are kept
beside those of the Trainer, and given back in the order in which they came.

Loaders with workers have generators of their own, and streams no sampler of batches: nothing is done of them.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_FILE: Final = ".dryfit-batch-numbers.pt"


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of this process's global generators of the CPU, of ``random``, NumPy and PyTorch."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> "GeneratorStates":
        """Return them as they are."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Make them as they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def plain(self) -> dict[str, Any]:
        """Return what ``torch.load(weights_only=True)`` reads."""
        name, keys, *rest = self.numpy
        return {
            "python": self.python,
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": self.torch,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "GeneratorStates":
        """Return what :meth:`plain` has written."""
        name, keys, *rest = plain["numpy"]
        return cls(plain["python"], (name, keys.numpy().astype(np.uint32), *rest), plain["torch"])


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Where a checkpoint goes on inside an epoch: the number of its next batch, and the states before and after it."""

    batch: int
    before: GeneratorStates
    after: GeneratorStates


@final
class BatchNumbers(TrainerCallback):
    """Writes what a checkpoint lacks into it, and gives it back to an attempt that goes on from there.

    It must come before the callback that marks checkpoints as whole.

    Args:
        trainer: The Trainer; it is connected by :meth:`install`.
        checkpoint: What it goes on from; None: it begins.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        self._trainer = trainer
        self._before: dict[int, GeneratorStates] = {}
        """The states before the last batches of this epoch were made, by their numbers."""
        self._done = 0
        """How many batches of this epoch have been trained on."""
        self._resumed = None if checkpoint is None or trainer.args.ignore_data_skip else _read(checkpoint / _FILE)
        self._passed = False
        self._for_step: GeneratorStates | None = None

    def install(self) -> None:
        """Look at the batches of the Trainer from now on."""
        trainer: Any = self._trainer
        make, take = trainer.get_train_dataloader, trainer.get_batch_samples

        def loader(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            self._watch(made)
            return made

        def batches(*args: Any, **kwargs: Any) -> Any:
            taken = take(*args, **kwargs)
            if self._passed:  # the Trainer is about to restore what the generators were before
                self._for_step = GeneratorStates.now()
            self._resumed, self._passed = None, False
            return taken

        trainer.get_train_dataloader, trainer.get_batch_samples = loader, batches
        trainer.add_callback(self)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count from the epoch's first batch, or from where the checkpoint was."""
        self._before.clear()
        self._done = self._resumed.batch if self._resumed is not None else 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on with the numbers that follow those of the batches, not with those of the checkpoint."""
        if self._for_step is not None:
            self._for_step.restore()
            self._for_step = None

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a batch."""
        self._done += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count a batch."""
        self._done += 1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the states from before the batch that was read ahead; at an epoch's end there is none."""
        before, folder = self._before.get(self._done), Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if before is not None and folder.is_dir():
            after = GeneratorStates.now().plain()
            torch.save({"batch": self._done, "before": before.plain(), "after": after}, folder / _FILE)

    def _watch(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(getattr(loader, "sampler", None), BatchSampler):
            sampler = loader.sampler
        if sampler is not None and getattr(loader, "num_workers", 1) == 0:
            _tell_numbers(sampler, self._about_to_make)

    def _about_to_make(self, batch: int) -> None:
        resumed = self._resumed
        if resumed is not None and batch == resumed.batch:
            resumed.before.restore()
        elif resumed is not None and batch == resumed.batch + 1:
            resumed.after.restore()
            self._passed = True
        self._before = {number: states for number, states in self._before.items() if number == batch - 1}
        self._before[batch] = GeneratorStates.now()


def _tell_numbers(sampler: Any, tell: Callable[[int], None]) -> None:
    """Let a sampler of batches say the number of each before its rows are read."""
    cls = type(sampler)

    class Telling(cls):
        def __iter__(self) -> Iterator[Any]:
            for number, rows in enumerate(super().__iter__()):
                tell(number)
                yield rows

    Telling.__name__, Telling.__qualname__ = cls.__name__, cls.__qualname__
    with suppress(TypeError):  # a class of C, or with slots of its own
        sampler.__class__ = Telling


def _read(file: Path) -> _Resumed | None:
    if not file.is_file():
        return None
    found = torch.load(file, weights_only=True)
    return _Resumed(found["batch"], GeneratorStates.of(found["before"]), GeneratorStates.of(found["after"]))
