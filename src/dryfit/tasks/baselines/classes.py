"""Baselines of classes: the commonest, chance, each class for all rows, and a linear model of words."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dryfit.core.seeds import derive_seed
from dryfit.core.settings.tables import DataSettings
from dryfit.core.settings.task_facts import MetricName
from dryfit.scoring.scored_row import CLASS, ScoredRow
from dryfit.tasks.baselines.baseline import Baseline, Rows
from dryfit.tasks.baselines.words import train_words
from dryfit.tasks.class_threshold import decided, fit_thresholds
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION, Row, Splits

_TRUE_FROM: Final = 0.5
_NEVER_CERTAIN: Final = 1e-12
"""Probabilities are kept so far from 0 and 1: their log-odds are finite."""
_MOST_CONSTANTS: Final = 20
"""Classes of which each is tried as the answer to all rows."""

Shares = NDArray[np.float64]


def class_baselines(
    splits: Splits, data: DataSettings, *, fits: bool = False, metric: MetricName | None = None
) -> Iterator[Baseline]:
    """Yield the baselines of a classification; with several classes a row, of each class for itself.

    Args:
        splits: The rows of train and validation.
        data: The number of classes, and whether a row has several.
        fits: A linear model's thresholds are fitted on validation, as a trained model's are with
            ``head.threshold = "calibrated"``.
        metric: The study's, by which they are fitted.
    """
    rows, several = splits[VALIDATION], data.multi_label
    has_RC = classes_of(splits[TRAIN], data.num_labels)
    # One row more of each class, and of none where a row may have several: a class that no row has is not impossible.
    p_C = (has_RC.sum(axis=0) + 1) / (len(has_RC) + (2 if several else data.num_labels))
    answer = partial(_answered, rows, several=several)
    if several:
        yield Baseline("majority", "each class where most training rows have it", lambda: answer(p_C))
        every_C = 0.5 + p_C / 2
        yield Baseline("constant", "always every class", lambda: answer(every_C))
    else:
        ranked = np.argsort(-p_C, kind="stable").tolist()
        first, share = data.class_name(ranked[0]), has_RC[:, ranked[0]].mean()
        words = f"always class {first}, which {share:.0%} of the training rows have"
        yield Baseline("majority", words, lambda: answer(p_C))
        for one in ranked[1:_MOST_CONSTANTS]:
            yield Baseline(
                f"constant-{one}", f"always class {data.class_name(one)}", partial(answer, _likeliest(p_C, one))
            )
    by_chance = partial(_by_chance, rows, p_C, several)
    yield Baseline("prior", "each class as often as in the training rows, by chance", by_chance)
    for name, words, balanced in (("tfidf", "", False), ("tfidf-balanced", ", classes weighed alike", True)):
        of_words = partial(_by_words, splits, has_RC, several, balanced, fits, metric)
        yield Baseline(name, f"TF-IDF of words and logistic regression{words}", of_words, is_linear=True)


def classes_of(rows: Sequence[Row], classes: int) -> Shares:
    """Return 1 where a row has a class, (rows, classes)."""
    has_RC = np.zeros((len(rows), classes))
    for at, row in enumerate(rows):
        has_RC[at, _plain(row.label)] = 1
    return has_RC


def _plain(label: float | tuple[int, ...] | None) -> Any:
    return list(label) if isinstance(label, tuple) else label


def _likeliest(p_C: Shares, one: int) -> Shares:
    """Return shares by which a class is the likeliest; the others are as they were to one another."""
    raised_C = p_C / 2
    raised_C[one] += 0.5
    return raised_C


def _answered(rows: Sequence[Row], p: Shares, *, several: bool) -> Rows:
    """Return rows that are answered by probabilities, (C,) for all rows or (R, C)."""
    found: list[ScoredRow] = []
    for row, p_C in zip(rows, np.broadcast_to(p, (len(rows), p.shape[-1])), strict=True):
        answer = np.flatnonzero(p_C >= _TRUE_FROM).tolist() if several else int(p_C.argmax())
        found.append(_scored(row, answer, p_C))
    return found


def _scored(row: Row, answer: Any, p_C: Shares) -> ScoredRow:
    """Return a row with an answer and its plain cross entropy; with several classes the mean over them."""
    truth = _plain(row.label)
    if isinstance(truth, list):
        has_C = np.isin(np.arange(len(p_C)), truth)
        loss = -np.log(np.maximum(np.where(has_C, p_C, 1 - p_C), np.finfo(np.float64).tiny)).mean()
    else:
        loss = -np.log(max(p_C[truth], np.finfo(np.float64).tiny))
    return ScoredRow(row.id, {CLASS: truth}, {CLASS: answer}, tuple(p_C.tolist()), {"loss": float(loss)})


def _by_chance(rows: Sequence[Row], p_C: Shares, several: bool) -> Rows:
    found: list[ScoredRow] = []
    for row in rows:
        generator = np.random.default_rng(derive_seed(0, "chance", row.id))
        has = np.flatnonzero(generator.random(len(p_C)) < p_C).tolist()
        found.append(_scored(row, has if several else int(generator.choice(len(p_C), p=p_C)), p_C))
    return found


def _by_words(
    splits: Splits, has_RC: Shares, several: bool, balanced: bool, fits: bool, metric: MetricName | None
) -> Rows:
    rows = splits[VALIDATION]
    predict = train_words([(row.criterion, row.text) for row in splits[TRAIN]], has_RC, balanced=balanced)
    p_RC = predict([(row.criterion, row.text) for row in rows])
    if not several:
        p_RC = p_RC / p_RC.sum(axis=1, keepdims=True)
    if not fits:
        return _answered(rows, p_RC, several=several)
    scores_RC = torch.from_numpy(p_RC)
    scores_RC = scores_RC.logit(_NEVER_CERTAIN) if several else scores_RC.clamp_min(_NEVER_CERTAIN).log()
    truth_RC = torch.from_numpy(classes_of(rows, p_RC.shape[1]))
    labels = truth_RC if several else truth_RC.argmax(dim=1)
    fitted = fit_thresholds(scores_RC, labels, metric, multi_label=several)
    said = decided(scores_RC, fitted, multi_label=several, calibrated=True)
    answers = [has_C.nonzero()[:, 0].tolist() for has_C in said] if several else said.tolist()
    return [_scored(row, answer, p_C) for row, answer, p_C in zip(rows, answers, p_RC, strict=True)]
