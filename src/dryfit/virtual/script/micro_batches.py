"""Leave out micro-batches of transformers' Trainer that take what one before them took.

A step over 16 micro-batches adds to the same gradients 16 times. The first one makes them, a later one finds them made:
after both, only a micro-batch with more rows or longer ones can take more. So that there is none, the second one is the
largest that the trainer has met, where the largest batch is what is asked for.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.work import WorkCounter

Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class _Step:
    """Micro-batches of one optimizer step that ran after its first.

    Attributes:
        number: Steps before it.
        rows: Rows of a micro-batch, which change where a trainer looks for a number that fits.
        begun: Whether its first one ran.
        ran: Shapes of each, and what it cost.
    """

    number: int
    rows: int | None
    begun: bool = False
    ran: list[tuple[Shapes, Counter[Any]]] = field(default_factory=list[tuple[Shapes, Counter[Any]]])


class RepeatedMicroBatches:
    """Knows which micro-batches ran in the current step of each trainer.

    Args:
        work: Counts what is left out too, as much as the one that it repeats.
        largest: Whether the second of a step is the largest that was met.
    """

    def __init__(self, work: WorkCounter | None = None, *, largest: bool = False) -> None:
        self.left_out = 0
        """How many were not run."""
        self._work = work or WorkCounter()
        self._steps: WeakKeyDictionary[Any, _Step] = WeakKeyDictionary()
        self._wants_largest = largest
        self._largest: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def install(self) -> None:
        """Change transformers' Trainer for good; a subclass that replaces ``training_step`` wholly runs everything."""
        when_imported("transformers.trainer", self._change)

    def _change(self, module: Any) -> None:
        original = module.Trainer.training_step

        @wraps(original)
        def training_step(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            step, state = self._steps.get(trainer), trainer.state
            if step is None or step.rows != state.train_batch_size:  # it begins anew, after an error too
                self._largest.pop(trainer, None)
            if step is None or (step.number, step.rows) != (state.global_step, state.train_batch_size):
                step = self._steps[trainer] = _Step(state.global_step, state.train_batch_size)
            shapes = _shapes(inputs)
            cost = _cost_of_repeated(step, shapes)
            if cost is not None and trainer.args.world_size == 1:  # of several ranks the last one sends gradients
                self.left_out += 1
                self._work.add(cost)
                return torch.zeros((), device=trainer.args.device)
            if self._wants_largest and shapes:
                largest = self._largest_of(trainer, inputs, shapes)
                if step.begun and not step.ran:
                    inputs, shapes = largest, _shapes(largest)
            before = self._work.so_far()
            del self._steps[trainer]  # put back where there is no error
            loss = original(trainer, model, inputs, *args, **kwargs)
            if step.begun and shapes:
                step.ran.append((shapes, self._work.so_far() - before))
            step.begun = True
            self._steps[trainer] = step
            return loss

        module.Trainer.training_step = training_step

    def _largest_of(self, trainer: Any, inputs: Any, shapes: Shapes) -> Any:
        """Return the largest batch that a trainer has met, of those that have the same entries."""
        largest = self._largest.get(trainer)
        known = _shapes(largest)
        if known.keys() != shapes.keys() or _elements(shapes) > _elements(known):
            self._largest[trainer] = largest = inputs
        return largest


def _shapes(inputs: Any) -> Shapes:
    """Return the shapes of a batch's tensors; none of what is no mapping: nobody knows what is made of it."""
    if not isinstance(inputs, Mapping):
        return {}
    return {str(name): tuple(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def _cost_of_repeated(step: _Step, shapes: Shapes) -> Counter[Any] | None:
    """Return the cost of a micro-batch that ran and was at least as large; None where none was."""
    for ran, cost in step.ran:
        if ran.keys() == shapes.keys() and all(_within(shapes[name], ran[name]) for name in ran):
            return cost
    return None


def _elements(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def _within(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) == len(large) and all(one <= other for one, other in zip(small, large, strict=True))
