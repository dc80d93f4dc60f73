"""Baselines of a regression: the mean, the median, and a linear model of words."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from dryfit.tasks.baselines.baseline import Baseline, Rows
from dryfit.tasks.baselines.words import train_numbers
from dryfit.tasks.number_answers import scored_number
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION, Row, Splits


def number_baselines(splits: Splits) -> Iterator[Baseline]:
    """Yield the baselines of a regression.

    Args:
        splits: The rows of train and validation.
    """
    known = right(splits[TRAIN])
    for name, value in (("mean", float(np.mean(known))), ("median", float(np.median(known)))):
        said = np.full(len(splits[VALIDATION]), value).tolist()
        words = f"always {value:.4g}, the {name} of the training rows"
        yield Baseline(name, words, partial(_scored, splits[VALIDATION], said))
    words = "TF-IDF of words and ridge regression"
    yield Baseline("tfidf", words, partial(_by_words, splits), is_linear=True)


def right(rows: Sequence[Row]) -> list[float]:
    """Return the labels of rows."""
    return [row.label for row in rows if isinstance(row.label, float)]


def _scored(rows: Sequence[Row], said: Sequence[float]) -> Rows:
    return [scored_number(row.id, truth, one) for row, truth, one in zip(rows, right(rows), said, strict=True)]


def _by_words(splits: Splits) -> Rows:
    predict = train_numbers([(row.criterion, row.text) for row in splits[TRAIN]], right(splits[TRAIN]))
    return _scored(splits[VALIDATION], predict([(row.criterion, row.text) for row in splits[VALIDATION]]))
