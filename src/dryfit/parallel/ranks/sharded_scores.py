"""The switch for vocabulary scores that stay sharded: it is on during calls of the whole model.

A head that is sharded by words gives each rank the scores of some words, and its plan gathers them. A loss that is
computed over the ranks (:mod:`dryfit.parallel.ranks.vocabulary_loss`) does not need the gathered scores.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import nn


@dataclass(slots=True)
class ShardedScores:
    """Switch for the scores of a plan that may stay sharded.

    Attributes:
        stay: Whether they stay sharded; else they are gathered.
    """

    stay: bool = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let them stay sharded in a part of a call that is run by itself."""
        before, self.stay = self.stay, True
        try:
            yield
        finally:
            self.stay = before

    @classmethod
    def in_calls_of(cls, module: nn.Module) -> Self:
        """Return a switch that is on during calls of the module, and off when a part is called, as in generation."""
        made = cls()

        def begin(*_: Any) -> None:
            made.stay = True

        def end(*_: Any) -> None:
            made.stay = False

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        return made
