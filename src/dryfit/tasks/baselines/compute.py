"""Child job BASELINES: values of the study's metric without a model, before any training."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError, DataError
from dryfit.core.jobs.baselines import BaselineScore, BaselinesRequest, BaselinesResult
from dryfit.core.settings.choices import Direction
from dryfit.core.wire import Phase
from dryfit.scoring.row_files import FACTS_FILE, kept, write_facts, write_rows
from dryfit.scoring.row_metrics import row_metric
from dryfit.scoring.scored_row import RowFacts
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.baselines.baseline import Baseline, HasBaselines, Rows, TimeIsUpError, at_most
from dryfit.tasks.folds import Fold, checked_fold, study_folds
from dryfit.tasks.prepare import checked_splits, prepared_tokens
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import TEST, TRAIN, VALIDATION, Splits, fingerprint
from dryfit.tasks.tokens.token_set import Tokens

_MOST_CONSTANTS = 4
"""Baselines of one answer that are kept: the plainest, and the best of the others."""


def baselines(body: BaselinesRequest, channel: ChildChannel) -> BaselinesResult:
    """Compute each baseline on the validation split, or on that of each fold.

    Raises:
        DataError: The rows are not those that the study was resolved with.
    """
    torch.set_num_threads(1)
    channel.send(Phase(name="load"))
    task = make_task(body.task, TaskContext(body.settings, body.data, metric=body.metric))
    splits = checked_splits(task)
    actual = fingerprint(splits)
    if actual != body.data_fingerprint:
        raise DataError("computing baselines", f"the rows have changed: fingerprint {actual}", body.data_fingerprint)
    folds: Sequence[Fold | None] = study_folds(body.data) or (None,)
    parts = {fold: splits if fold is None else checked_fold(task, splits, fold) for fold in folds}
    out = Path(body.out_dir)
    _remove(out)
    write_facts(out / FACTS_FILE, _facts(splits, list(parts.values())))
    if not isinstance(task, HasBaselines):
        return BaselinesResult(notes=(f"{type(task).__name__} names no baselines",))
    found: dict[str, _Found] = {}
    notes: list[str] = []
    for fold, rows in parts.items():
        tokens = partial(_tokens, task, body, fold)
        for baseline in task.baselines(rows, tokens):
            try:
                with at_most(body.limit_s):
                    scored, told = baseline.scored()
            except TimeIsUpError:
                notes.append(f"{baseline.name} is left out: it took longer than {body.limit_s:g} s")
                continue
            except ConfigError as error:  # a user's own metric of answers
                notes.append(f"{baseline.name} is left out: {error.doing}: {error.found}")
                continue
            channel.beat()
            of_fold = found.setdefault(baseline.name, _Found(baseline, task.metric_names()))
            of_fold.add(VALIDATION if fold is None else f"fold-{fold.number}", scored, told)
    whole = [one for one in found.values() if len(one.splits) == len(parts)]
    chosen = list(_chosen(whole, body))
    for one in chosen:
        one.write(out / one.baseline.name)
    return BaselinesResult(baselines=tuple(one.score() for one in chosen), notes=tuple(dict.fromkeys(notes)))


def _remove(folder: Path) -> None:
    """Remove what an earlier run left; of a symbolic link the link, not what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


class _Found:
    """A baseline's rows, and its metrics of each split.

    Args:
        baseline: Which one.
        names: The task's metrics.
    """

    def __init__(self, baseline: Baseline, names: Sequence[str]) -> None:
        self.baseline = baseline
        self.splits: dict[str, tuple[Rows, dict[str, float]]] = {}
        self._names = names

    def add(self, split: str, rows: Rows, told: Mapping[str, float]) -> None:
        """Take in the rows of a split, and those of its metrics that they do not tell."""
        metrics = {name: metric.value for name in self._names if (metric := row_metric(name, rows)) is not None}
        self.splits[split] = rows, {**told, **metrics}

    def score(self) -> BaselineScore:
        """Return its metrics; of several folds, the means."""
        every = [metrics for _, metrics in self.splits.values()]
        shared = [name for name in every[0] if all(name in one for one in every)]
        means = {name: float(np.mean([one[name] for one in every])) for name in shared}
        return BaselineScore(
            name=self.baseline.name, words=self.baseline.words, metrics=means, is_linear=self.baseline.is_linear
        )

    def write(self, folder: Path) -> None:
        """Write its rows, a file for each split."""
        for split, (rows, metrics) in self.splits.items():
            write_rows(folder, split, rows, metrics)


def _chosen(found: Sequence[_Found], body: BaselinesRequest) -> Iterator[_Found]:
    """Yield the plainest baseline, the best others of one answer by the study's metric, and those that are trained."""
    plain = [one for one in found if not one.baseline.is_linear]
    yield from plain[:1]
    ranked = sorted(plain[1:], key=lambda one: _rank(one.score().metrics.get(body.metric, math.nan), body.direction))
    yield from ranked[: _MOST_CONSTANTS - 1]
    yield from (one for one in found if one.baseline.is_linear)


def _rank(value: float, direction: Direction) -> float:
    """Return what sorts values from the best on; NaN is the last."""
    return math.inf if math.isnan(value) else -value if direction is Direction.MAXIMIZE else value


def _tokens(task: Task, body: BaselinesRequest, fold: Fold | None) -> Tokens:
    return prepared_tokens(
        task,
        cache_dir=Path(body.cache_dir),
        data_fingerprint=body.data_fingerprint,
        only=(TRAIN, VALIDATION),
        fold=fold,
    )


def _facts(splits: Splits, parts: Sequence[Splits]) -> dict[str, RowFacts]:
    """Return the facts of the rows that files of scored rows keep: those of validation or of all folds, and of test."""
    facts: dict[str, RowFacts] = {}
    scored = [*(rows[VALIDATION] for rows in parts), *(splits[name] for name in splits if name == TEST)]
    for rows in scored:
        chosen = kept([row.id for row in rows])
        facts |= {rows[at].id: RowFacts(rows[at].group, rows[at].criterion) for at in chosen}
    return facts
