"""The type of a baseline, and the interface by which a task declares its own."""

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dryfit.scoring.scored_row import ScoredRow
from dryfit.tasks.base import Measured
from dryfit.tasks.rows.checked_rows import Splits
from dryfit.tasks.tokens.token_set import Tokens

Rows = Sequence[ScoredRow]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Answers to the rows of the validation split that no model was trained for, or a linear one at most.

    Attributes:
        name: A word, by which it is the same baseline in another fold: ``majority``.
        words: What it answers: ``always class 1, which 79 % of the training rows have``.
        rows: Gives the rows, or rows with metrics that they do not tell; it may take long.
        is_linear: It is trained: a linear model.
    """

    name: str
    words: str
    rows: Callable[[], Rows | Measured]
    is_linear: bool = False

    def scored(self) -> tuple[Rows, Mapping[str, float]]:
        """Return the rows, and those of their metrics that they do not tell."""
        found = self.rows()
        return (list(found.rows.values()), found.metrics) if isinstance(found, Measured) else (found, {})


@runtime_checkable
class HasBaselines(Protocol):
    """A task with baselines of its own."""

    def baselines(self, splits: Splits, tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
        """Yield the baselines of the validation split; each sees no more of it than a model would.

        Args:
            splits: The rows of train and validation.
            tokens: Gives the same as tokens, for what is measured by token.
        """
        ...


class TimeIsUpError(Exception):
    """A piece of work has taken its time."""


@contextmanager
def at_most(seconds: float) -> Generator[None, None, None]:
    """Interrupt the block after a time limit; only in the main thread of a process that does not use SIGALRM.

    Raises:
        TimeIsUpError: It took longer.
    """

    def stop(*_: Any) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
