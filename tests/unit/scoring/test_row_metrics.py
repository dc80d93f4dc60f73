"""Metrics from scored rows equal those that trials report, for any weighting of the rows."""

import math

import numpy as np
import pytest
import torch

from dryfit.settings.choices import Metric
from dryfit.tasks.answers import multi_label_metrics, one_class_metrics
from dryfit.tasks.classification import ClassAnswers
from dryfit.tasks.row_metrics import row_metric
from dryfit.tasks.scored_rows import ScoredRow
from dryfit.tasks.spans import scored_spans, span_metrics
from dryfit.tasks.windows import Ragged

pytestmark = pytest.mark.heavy


def class_rows(scores: torch.Tensor, labels: torch.Tensor, *, several: bool = False) -> list[ScoredRow]:
    answers = ClassAnswers(scores, labels, several)
    return list(answers.scored_rows([str(row) for row in range(len(scores))], {}))


def test_fitted_thresholds_decide_the_answers() -> None:
    generator = torch.Generator().manual_seed(5)
    labels, scores = torch.randint(0, 2, (90,), generator=generator), torch.randn(90, 2, generator=generator) + 0.4
    answers = ClassAnswers(scores, labels, False, calibrated=True, metric=Metric.F1_MACRO)
    fitted = answers.fit()
    rows = list(answers.scored_rows([str(row) for row in range(90)], fitted))
    assert [row.answer["class"] for row in rows] != scores.argmax(dim=-1).tolist()
    for name, value in answers.metrics(fitted).items():
        metric = row_metric(name, rows)
        assert metric is not None and metric.value == pytest.approx(value, rel=1e-6), name


def spans(counts: list[int], rng: np.random.Generator) -> Ragged:
    starts = rng.integers(0, 60, sum(counts))
    return Ragged(
        torch.tensor(np.stack([starts, starts + rng.integers(1, 30, sum(counts))], axis=1), dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int64),
    )


def repeated(counts: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.repeat(np.arange(len(counts)), counts))


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_metrics_of_classes_are_the_reported_ones_for_any_weights(classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes - seed % 2, (83,), generator=generator)  # sometimes a class is in no row
    scores = torch.randn(83, classes, generator=generator)
    scores[::5] = scores[0]  # ties
    rows = class_rows(scores, labels)
    counts = np.random.default_rng(seed).integers(0, 4, (3, 83))
    for weights in (np.ones(83, dtype=int), *counts):
        picked = repeated(weights)
        wanted = one_class_metrics(scores[picked], labels[picked])
        for name, value in wanted.items():
            metric = row_metric(name, rows)
            assert metric is not None, name
            found = metric.of(weights[None].astype(float))[0]
            assert found == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_several_classes_a_row(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(61, 4, generator=generator) < 0.3).to(torch.uint8)
    scores = torch.randn(61, 4, generator=generator)
    rows = class_rows(scores, labels, several=True)
    weights = np.random.default_rng(seed).integers(0, 3, 61)
    wanted = multi_label_metrics(scores[repeated(weights)], labels[repeated(weights)])
    for name, value in wanted.items():
        metric = row_metric(name, rows)
        assert metric is not None, name
        assert metric.of(weights[None].astype(float))[0] == pytest.approx(value, rel=1e-6, nan_ok=True), name


def part(ragged: Ragged, picked: list[int]) -> Ragged:
    ends = np.cumsum(ragged.counts_R.numpy())
    pieces = [ragged.spans_N2[int(ends[row] - ragged.counts_R[row]) : int(ends[row])] for row in picked]
    return Ragged(torch.cat(pieces), ragged.counts_R[picked])


@pytest.mark.parametrize("has", [(0, 1, 2, 0, 1, 3, 0), (0,) * 7, (1,) * 7])
def test_metrics_of_spans(has: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    golds, words = spans(list(has), rng), Ragged.of([[(at, at + 4) for at in range(0, 90, 5)]] * 7)
    starts = rng.integers(0, 50, 7)
    answers = np.stack([starts, starts + 12], axis=1)
    answers[[1, 3]] = 0
    rows = list(scored_spans([str(row) for row in range(7)], answers, golds, words))
    for weights in (np.ones(7, dtype=int), np.array([2, 0, 1, 3, 1, 1, 0])):
        picked = repeated(weights).tolist()
        wanted = span_metrics(answers[picked], part(golds, picked), part(words, picked))
        for name, value in wanted.items():
            metric = row_metric(name, rows)
            assert metric is not None, name
            assert metric.of(weights[None].astype(float))[0] == pytest.approx(value, nan_ok=True), name


def test_loss_is_a_mean_over_terms() -> None:
    rows = [
        ScoredRow("a", {}, {}, values={"loss": 6.0, "loss_terms": 3}),
        ScoredRow("b", {}, {}, values={"loss": 1.0, "loss_terms": 1}),
    ]
    metric = row_metric("loss", rows)
    assert metric is not None and metric.value == pytest.approx(7 / 4)


def test_what_rows_do_not_say_is_no_metric() -> None:
    rows = [ScoredRow("a", {"span": []}, {"span": None}, values={"token_f1": 1.0})]
    for name in ("f1_macro", "auroc", "combined", "loss", "my_own_score"):
        assert row_metric(name, rows) is None
    assert row_metric("token_f1", []) is None
    null = row_metric("token_f1_has", rows)
    assert null is not None and math.isnan(null.value)
