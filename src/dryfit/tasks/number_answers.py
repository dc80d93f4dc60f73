"""Answers of a regression: one number to a row.

Dimension suffix: ``R`` rows of a split.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from dryfit.core.settings.choices import Metric
from dryfit.core.settings.splits import TRAIN
from dryfit.scoring.scored_row import NUMBER, ScoredRow
from dryfit.tasks.metrics import number_metrics
from dryfit.tasks.rows.checked_rows import Readable
from dryfit.tasks.tokens.token_set import Tokens, TokenSet

_FAR: Final = 10.0
"""A mean or standard deviation of labels from which on they are called far from 0."""


@final
@dataclass(frozen=True, slots=True)
class NumberAnswers:
    """Numbers of rows.

    Attributes:
        said_R: On the CPU.
        labels_R: The right ones.
    """

    said_R: torch.Tensor
    labels_R: torch.Tensor

    def fit(self) -> Mapping[str, float]:
        """Choose nothing."""
        return {}

    def metrics(self, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return every metric of numbers."""
        del fitted
        return number_metrics(self.said_R, self.labels_R)

    def predictions(self, rows: Sequence[Readable], fitted: Mapping[str, float]) -> Iterator[dict[str, object]]:
        """Yield the number of each row."""
        del rows, fitted
        yield from ({"value": said} for said in self.said_R.tolist())

    def scored_rows(self, ids: Sequence[str], fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each row's number beside the right one, with its errors."""
        del fitted
        for name, right, said in zip(ids, self.labels_R.tolist(), self.said_R.double().tolist(), strict=True):
            yield scored_number(name, right, said)


def scored_number(name: str, right: float, said: float) -> ScoredRow:
    """Return a row with a number beside the right one, and its errors."""
    squared, absolute = (said - right) ** 2, abs(said - right)
    values: dict[str, float] = {Metric.MSE: squared, Metric.MAE: absolute, Metric.LOSS: squared}
    return ScoredRow(name, {NUMBER: right}, {NUMBER: said}, values=values)


def scale_remark(tokens: Tokens) -> tuple[str, ...]:
    """Return a remark on training labels far from 0, where a fresh head's numbers lie; nothing where they are near."""
    split: TokenSet | None = tokens.splits.get(TRAIN)
    if split is None or len(split) < 2:
        return ()
    mean, spread = split.labels_R.mean().item(), split.labels_R.std().item()
    if abs(mean) <= _FAR and spread <= _FAR:
        return ()
    found = f"labels have the mean {mean:.4g} and the standard deviation {spread:.4g}"
    return (f"{found}: training begins near 0 and takes small steps; mean 0 and deviation 1 are learned soonest",)
