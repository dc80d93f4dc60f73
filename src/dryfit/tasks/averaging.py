"""What several models say together: the mean of their probabilities, where their tokens do not matter.

Dimension suffixes: ``R`` rows, ``C`` classes, ``T`` tokens, ``K`` numbers kept of a row or of a token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.core.errors import ConfigError
from dryfit.tasks.base import Batch, Outputs, Task
from dryfit.tasks.rows.checked_rows import Readable
from dryfit.tasks.tokens.token_set import TokenSet


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """What one model says of some rows.

    Attributes:
        kept_RK: What :meth:`~dryfit.tasks.base.Task.keep` keeps of each row of tokens, in order, on the CPU.
        by_token_TK: What :meth:`AveragingTask.keep_tokens` keeps of each token; None where that is nothing.
        tokens: The rows as this model reads them.
    """

    kept_RK: torch.Tensor
    by_token_TK: torch.Tensor | None
    tokens: TokenSet


class Answers(Protocol):
    """What several models say of some rows together."""

    def fit(self) -> Mapping[str, float]:
        """What is chosen by it, where the rows are the validation split; may be empty."""
        ...

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the rows; without what is of one model's tokens alone."""
        ...

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """What is said of each row, in order, as JSON takes it."""
        ...


@runtime_checkable
class AveragingTask(Protocol):
    """A task that says what the mean of several models is; each may have settings and tokens of its own."""

    def keep_tokens(self, outputs: Outputs, batch: Batch) -> torch.Tensor | None:
        """Numbers of each token that the mean is made of, (rows, tokens, K); None: it is made of whole rows."""
        ...

    def averaged(self, said: Sequence[ModelOutputs]) -> Answers:
        """What several models of this task say of the same rows together; how it is told is decided by this one."""
        ...


def averaging(task: Task) -> AveragingTask:
    """A task as one that can be averaged.

    Raises:
        ConfigError: It cannot.
    """
    if isinstance(task, AveragingTask):
        return task
    raise ConfigError(
        "averaging models",
        f"{type(task).__name__} does not say what their mean is",
        "models of criteria, evidence, share or joint",
    )


def mean_scores(scores: Sequence[torch.Tensor], *, multi_label: bool) -> torch.Tensor:
    """Scores whose probabilities are the mean of those of several models, (R, C), fp64.

    The mean is taken of probabilities and not of scores: a linear opinion pool (Genest and Zidek 1986), as deep
    ensembles are averaged (Lakshminarayanan et al. 2017, arXiv:1612.01474, section 2.4).

    Args:
        scores: Of each model (R, C), before softmax or sigmoid.
        multi_label: Each class is for itself: the sigmoid is meant.
    """
    doubles = [one.double() for one in scores]
    if not multi_label:
        return _log_mean([F.log_softmax(one, dim=-1) for one in doubles])
    has = _log_mean([F.logsigmoid(one) for one in doubles])
    has_not = _log_mean([F.logsigmoid(-one) for one in doubles])
    return has - has_not


def _log_mean(logs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(logs)).logsumexp(dim=0) - math.log(len(logs))
