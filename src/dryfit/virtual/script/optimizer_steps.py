"""Count the optimizer steps of a script that knows nothing of it.

A step of the script is one of its optimizers: with several (a generator's and a discriminator's), step n begins when
the first of them makes its n-th. Wrappers (Accelerate's, Lightning's, ``GradScaler``) call the optimizer that they
wrap, and that one is counted; a step that a scaler skips is none.
"""

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch.optim.optimizer as optimizers
from torch.optim import Optimizer

PATIENCE = 4
"""Times the steps asked for after which an optimizer that takes none, or few, is waited for no longer; and times that
a script is ended before it is not asked any more."""


class RehearsalDone(BaseException):
    """Enough steps were seen: ends the script, through its ``finally`` blocks and past its ``except Exception``."""


class OptimizerSteps:
    """Counts steps, and says when enough were made.

    Args:
        wanted: Steps that are enough.
        on_start: Called with a step's number before its first optimizer begins.
        on_end: Called with a step's number after its first optimizer has ended.
        on_ignored: Called where a script catches its end, and goes on.

    Attributes:
        number: Steps that have ended.
    """

    def __init__(
        self,
        wanted: int,
        on_start: Callable[[int], None],
        on_end: Callable[[int], None],
        on_ignored: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = 0
        self._wanted = wanted
        self._on_start = on_start
        self._on_end = on_end
        self._on_ignored = on_ignored
        self._times_ended = 0
        self._made: WeakSet[Optimizer] = WeakSet()
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._done = False
        self._before_step: Callable[[], None] = lambda: None

    def install(self, before_step: Callable[[], None]) -> None:
        """Watch every optimizer of the process from now on.

        Args:
            before_step: Called before each optimizer's step; what it raises ends the script there.
        """
        self._before_step = before_step

        def begins(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if _within_its_own_step(optimizer):
                return
            before_step()
            if self._counts.get(optimizer, 0) == self.number:
                self._on_start(self.number + 1)

        def ends(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if _within_its_own_step(optimizer):
                return
            count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            if count > self.number:
                self.number = count
                self._on_end(count)

        original = Optimizer.__init__

        @wraps(original)
        def initialise(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        Optimizer.__init__ = initialise  # pyright: ignore[reportAttributeAccessIssue]
        optimizers.register_optimizer_step_pre_hook(begins)
        optimizers.register_optimizer_step_post_hook(ends)

    @property
    def has_optimizer(self) -> bool:
        """Whether the script has made an optimizer."""
        return bool(self._made)

    def begins_by_hand(self) -> None:
        """A step without an optimizer begins."""
        self._before_step()
        self._on_start(self.number + 1)

    def ends_by_hand(self) -> None:
        """A step without an optimizer has ended."""
        self.number += 1
        self._on_end(self.number)

    def end_script(self) -> NoReturn:
        """End the script.

        Raises:
            RehearsalDone: Always.
        """
        self._times_ended += 1
        if self._times_ended > PATIENCE:
            self._on_ignored()
        raise RehearsalDone

    def see_one_more(self) -> None:
        """Want another step than those that were made."""
        self._wanted, self._done = self.number + 1, False

    @property
    def done(self) -> bool:
        """Whether enough was seen: each living optimizer has made the steps, or one has made many more."""
        if not self._done and self.number >= self._wanted:
            waiting = any(self._counts.get(optimizer, 0) < self._wanted for optimizer in self._made)
            self._done = not waiting or self.number >= PATIENCE * self._wanted
        return self._done


def _within_its_own_step(optimizer: Optimizer) -> bool:
    """Return whether a subclass's step has called its parent's: torch announces both."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == "wrapper")
    own = (frame for frame in frames if frame.f_code.co_filename == optimizers.__file__)
    return sum(frame.f_locals.get("self") is optimizer for frame in own) > 1
