"""Thresholds of classes: against every decision that there is, by scikit-learn; ties, rounding, and their limits."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import DataSettings, HeadSettings, TrialSettings
from dryfit.settings.task_facts import MetricName
from dryfit.tasks.answers import CLASS_THRESHOLD, HALF, fit_threshold, fit_thresholds
from dryfit.tasks.base import TaskContext
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.tokens import TokenFacts, TokenSet

BY: dict[Metric, Callable[..., float]] = {
    Metric.F1_MACRO: lambda truth, said: reference.f1_score(truth, said, average="macro", zero_division=0),
    Metric.F1: lambda truth, said: reference.f1_score(truth, said, zero_division=0),
    Metric.ACCURACY: reference.accuracy_score,
    Metric.BALANCED_ACCURACY: lambda truth, said: float(
        np.mean([(said[truth == label] == label).mean() for label in (0, 1) if (truth == label).any()])
    ),
    Metric.MCC: reference.matthews_corrcoef,
}


def drawn(seed: int, rows: int = 40, *, share: float = 0.25) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of two classes and labels of rows: class 1 is rare, and the scores know it and a little more."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(rows) < share).astype(np.int64)
    margins = rng.normal(size=rows) * 1.5 - 2 + 1.5 * labels
    base = rng.normal(size=rows)
    if seed % 2:
        margins, base = margins.round(1), base * 0  # many rows with equal scores
    return torch.tensor(np.stack([base, base + margins], axis=1), dtype=torch.float32), torch.from_numpy(labels)


def split_of(labels: torch.Tensor) -> TokenSet:
    return TokenSet(torch.zeros(len(labels), dtype=torch.int32), None, torch.arange(len(labels) + 1), labels)


def task_of(
    metric: MetricName | None = None, *, classes: int = 2, multi_label: bool = False, threshold: str
) -> CriteriaTask:
    settings = TrialSettings(head=HeadSettings.model_validate({"threshold": threshold}))
    facts = TokenFacts(label_counts=dict.fromkeys(range(classes), 1), train_rows=classes + 1)
    return CriteriaTask(TaskContext(settings, DataSettings(num_labels=classes, multi_label=multi_label), facts, metric))


@pytest.mark.parametrize("metric", BY)
def test_no_decision_by_a_threshold_is_better_on_validation(metric: Metric) -> None:
    moved = 0
    for seed in range(8):
        scores, labels = drawn(seed)
        task, tokens = task_of(metric, threshold="calibrated"), split_of(labels)
        fitted = task.fit(scores, tokens)
        assert set(fitted) == {CLASS_THRESHOLD}
        p = (scores[:, 1].double() - scores[:, 0].double()).sigmoid().numpy()
        every = [BY[metric](labels.numpy(), (p > cut).astype(int)) for cut in (-1, *p)]
        found = task.metrics(scores, tokens, fitted)
        assert found[metric] == pytest.approx(max(every), abs=1e-12)
        assert found[metric] == pytest.approx(BY[metric](labels.numpy(), (p > fitted[CLASS_THRESHOLD]).astype(int)))
        moved += found[metric] > task.metrics(scores, tokens, {})[metric] + 1e-9
    assert moved, "one half is the best everywhere: nothing is tested"


def test_by_a_metric_that_knows_no_decision_it_is_that_of_f1_macro() -> None:
    for seed in range(4):
        scores, labels = drawn(seed)
        by_f1 = fit_thresholds(scores, labels, Metric.F1_MACRO, multi_label=False)
        for metric in (None, Metric.LOSS, Metric.AUROC, Metric.ECE, Metric.COMBINED):
            assert fit_thresholds(scores, labels, metric, multi_label=False) == by_f1


def test_calibration_ranking_and_loss_do_not_depend_on_the_threshold() -> None:
    scores, labels = drawn(2)
    task, tokens = task_of(Metric.F1, threshold="calibrated"), split_of(labels)
    fixed, found = task.metrics(scores, tokens, {}), task.metrics(scores, tokens, task.fit(scores, tokens))
    same = {Metric.LOSS, Metric.AUROC, Metric.ECE}
    assert {name: found[name] for name in same} == {name: fixed[name] for name in same}
    assert found["f1"] > fixed["f1"]


def test_fixed_fits_nothing_and_decides_as_ever() -> None:
    scores, labels = drawn(3)
    task, tokens = task_of(threshold="fixed"), split_of(labels)
    assert task.fit(scores, tokens) == {}
    said = [row["label"] for row in task.predictions(scores, tokens, [])]  # pyright: ignore[reportArgumentType]
    assert said == scores.argmax(dim=-1).tolist()
    several = task_of(multi_label=True, threshold="fixed")
    rows = list(several.predictions(scores, tokens, []))
    assert [row["label"] for row in rows] == [[c for c in (0, 1) if row[c] >= 0] for row in scores.tolist()]


def test_of_several_labels_each_class_has_its_best_f1_and_all_together_the_best_mean() -> None:
    rng = np.random.default_rng(4)
    labels = (rng.random((60, 3)) < [0.1, 0.5, 0.3]).astype(np.uint8)
    scores = torch.tensor(rng.normal(size=(60, 3)) - 1 + 1.5 * labels, dtype=torch.float32)
    task = task_of(Metric.F1_MACRO, classes=3, multi_label=True, threshold="calibrated")
    tokens = split_of(torch.from_numpy(labels))
    fitted = task.fit(scores, tokens)
    assert list(fitted) == [f"{CLASS_THRESHOLD}_{label}" for label in range(3)]
    p = scores.double().sigmoid().numpy()
    best = [
        max(reference.f1_score(labels[:, c], p[:, c] > cut, zero_division=0) for cut in (-1, *p[:, c]))
        for c in range(3)
    ]
    found = task.metrics(scores, tokens, fitted)
    assert found["f1_macro"] == pytest.approx(np.mean(best), abs=1e-12)
    assert found["f1_macro"] > task.metrics(scores, tokens, {})["f1_macro"]
    known = CriteriaTask(replace(task.context, fitted=fitted))
    said = [row["label"] for row in known.predictions(scores, tokens, [])]
    assert said == [[c for c in range(3) if row[c] > fitted[f"{CLASS_THRESHOLD}_{c}"]] for row in p.tolist()]


def test_of_equally_good_thresholds_the_nearest_to_one_half_is_taken() -> None:
    odds, has = np.array([-3.0, -2.0, 2.0, 3.0]), np.array([False, False, True, True])
    assert fit_threshold(odds, has, Metric.F1_MACRO) == HALF
    # To find all rows and to find none are as good, and as near: the smaller is taken.
    ends = fit_threshold(np.array([-1.0, 1.0]), np.array([True, False]), Metric.ACCURACY)
    assert ends == pytest.approx(1 / (1 + np.exp(2.0)))
    low = fit_threshold(odds - 2.5, has, Metric.F1_MACRO)
    assert low == pytest.approx(1 / (1 + np.exp(2.5)))
    assert fit_threshold(odds, np.ones(4, dtype=bool), Metric.MCC) == HALF, "mcc is 0 everywhere"


def test_rounding_changes_no_decision_on_the_rows_it_was_fitted_on() -> None:
    for seed in range(6):
        scores, labels = drawn(seed)
        task, tokens = task_of(Metric.F1, threshold="calibrated"), split_of(labels)
        fitted = task.fit(scores, tokens)
        noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) * 2e-6 - 1e-6
        found, again = task.metrics(scores, tokens, fitted), task.metrics(scores + noise, tokens, fitted)
        assert again["f1"] == found["f1"] and again["mcc"] == found["mcc"]


@pytest.mark.parametrize("scale", [1e-30, 1e3])
def test_probabilities_that_are_0_and_1_as_numbers_are_told_apart_as_far_as_they_differ(scale: float) -> None:
    odds = np.array([-1.0, -0.5, 0.5, 1.0]) * scale
    has = np.array([False, True, True, True])
    threshold = fit_threshold(odds, has, Metric.ACCURACY)
    assert 0 <= threshold <= 1
    p = torch.from_numpy(odds).sigmoid().numpy()
    assert ((p > threshold) == has).mean() == max(((p > cut) == has).mean() for cut in (-1, *p))


def test_scores_that_are_no_numbers_leave_one_half() -> None:
    scores, labels = drawn(0)
    scores[3, 1] = float("nan")
    assert fit_thresholds(scores, labels, Metric.F1, multi_label=False) == {CLASS_THRESHOLD: HALF}
    assert fit_threshold(np.zeros(0), np.zeros(0, dtype=bool), Metric.F1) == HALF


def test_more_than_two_classes_of_which_a_row_has_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="one threshold does not choose among more than two classes"):
        task_of(classes=3, threshold="calibrated")
