"""Averages of several models: the mean of their probabilities.

Dimension suffixes: ``R`` rows, ``C`` classes, ``T`` tokens, ``K`` numbers kept of a row or of a token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.core.errors import ConfigError
from dryfit.scoring.scored_row import ScoredRow
from dryfit.tasks.base import Batch, Outputs, Task
from dryfit.tasks.rows.checked_rows import Readable
from dryfit.tasks.tokens.token_set import TokenSet


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """Outputs of one model for some rows.

    Attributes:
        kept_RK: :meth:`~dryfit.tasks.base.Task.keep` of each row of tokens, in order, on the CPU.
        by_token_TK: :meth:`AveragingTask.keep_tokens` of each token; None where it keeps nothing.
        tokens: The rows as this model's tokenizer made them.
    """

    kept_RK: torch.Tensor
    by_token_TK: torch.Tensor | None
    tokens: TokenSet


class Answers(Protocol):
    """Answers to some rows, from one model or the mean of several."""

    def fit(self) -> Mapping[str, float]:
        """Choose numbers (a threshold) by these answers, where the rows are the validation split; may be empty."""
        ...

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the rows, without those that need one model's tokens."""
        ...

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield the prediction of each row, in order, as JSON takes it."""
        ...

    def scored_rows(self, ids: Sequence[str], fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row, in order, with its answer beside the right one."""
        ...


@runtime_checkable
class AveragingTask(Protocol):
    """A task that defines the mean of several models; each may have settings and tokens of its own."""

    def keep_tokens(self, outputs: Outputs, batch: Batch) -> torch.Tensor | None:
        """Return what the mean needs of each token, (rows, tokens, K); None: nothing, it is one of rows."""
        ...

    def averaged(self, outputs: Sequence[ModelOutputs]) -> Answers:
        """Return the mean answers of several models of this task to the same rows, decoded by this one's settings."""
        ...


def averaging(task: Task) -> AveragingTask:
    """Return the task as one that can be averaged.

    Raises:
        ConfigError: It defines no mean.
    """
    if isinstance(task, AveragingTask):
        return task
    raise ConfigError(
        "averaging models",
        f"{type(task).__name__} does not say what their mean is",
        "models of criteria, evidence, share or joint",
    )


def mean_scores(scores: Sequence[torch.Tensor], *, multi_label: bool) -> torch.Tensor:
    """Return scores whose probabilities are the mean of several models' probabilities, (R, C), fp64.

    The mean is taken of probabilities and not of scores: a linear opinion pool (Genest and Zidek 1986), as deep
    ensembles are averaged (Lakshminarayanan et al. 2017, arXiv:1612.01474, section 2.4).

    Args:
        scores: Of each model (R, C), before softmax or sigmoid.
        multi_label: Probabilities are sigmoids, not a softmax.
    """
    doubles = [one.double() for one in scores]
    if not multi_label:
        return _log_mean([F.log_softmax(one, dim=-1) for one in doubles])
    has = _log_mean([F.logsigmoid(one) for one in doubles])
    has_not = _log_mean([F.logsigmoid(-one) for one in doubles])
    return has - has_not


def _log_mean(logs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(logs)).logsumexp(dim=0) - math.log(len(logs))
