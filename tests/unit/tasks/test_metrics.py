import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import tasks
from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import DataSettings, HeadSettings, TrialSettings
from dryfit.settings.task_facts import MetricName, metrics_of_classes
from dryfit.tasks.answers import (
    CLASS_THRESHOLD,
    HALF,
    check_metrics,
    fit_threshold,
    fit_thresholds,
    multi_label_metrics,
    one_class_metrics,
)
from dryfit.tasks.base import TaskContext
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.row_metrics import class_metric
from dryfit.tasks.tokens import TokenFacts, TokenSet


def split_of(labels: torch.Tensor) -> TokenSet:
    return TokenSet(torch.zeros(len(labels), dtype=torch.int32), None, torch.arange(len(labels) + 1), labels)


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Naeini et al. 2015: over fifteen bins, the share of rows in each times its |accuracy - mean confidence|."""
    found = 0.0
    for low in range(15):
        within = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if within.any():
            found += within.mean() * abs(right[within].mean() - confidence[within].mean())
    return found


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_scikit_learns(classes: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, classes, (57,))
    logits = torch.randn(57, classes)
    task = tasks.criteria(num_labels=classes, train_counts=dict.fromkeys(range(classes), 1))
    found = task.metrics(logits, split_of(labels), {})
    truth, guess, p = labels.numpy(), logits.argmax(-1).numpy(), logits.double().softmax(-1).numpy()
    assert found["f1_macro"] == pytest.approx(reference.f1_score(truth, guess, average="macro"))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(truth, guess))
    assert found["mcc"] == pytest.approx(reference.matthews_corrcoef(truth, guess))
    assert found["loss"] == pytest.approx(reference.log_loss(truth, p), rel=1e-5)
    score = {"y_score": p[:, 1]} if classes == 2 else {"y_score": p, "multi_class": "ovr"}
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(truth, **score))
    assert found["ece"] == pytest.approx(calibration_error(p.max(-1), truth == guess), rel=1e-5)
    assert set(found) == set(metrics_of_classes(DataSettings(num_labels=classes)))
    if classes == 2:
        assert found["f1"] == pytest.approx(reference.f1_score(truth, guess))


@pytest.mark.parametrize("classes", [1, 4])
def test_metrics_of_several_labels_are_scikit_learns(classes: int) -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 2, (57, classes), dtype=torch.uint8)
    labels[0] = 0  # a row may have none
    logits = torch.randn(57, classes)
    counts = dict.fromkeys(range(classes), 1)
    task = tasks.criteria(num_labels=classes, train_counts=counts, train_rows=57, multi_label=True)
    found = task.metrics(logits, split_of(labels), {})
    truth, p = labels.numpy(), logits.double().sigmoid().numpy()
    guess = p > 0.5
    each = [reference.f1_score(truth[:, label], guess[:, label]) for label in range(classes)]
    assert found["f1_macro"] == pytest.approx(np.mean(each))
    assert found["accuracy"] == pytest.approx((truth == guess).all(axis=1).mean())
    ranked = [reference.roc_auc_score(truth[:, label], p[:, label]) for label in range(classes)]
    assert found["auroc"] == pytest.approx(np.mean(ranked))
    assert found["ece"] == pytest.approx(calibration_error(p.flatten(), truth.flatten()), rel=1e-5)
    assert found["loss"] == pytest.approx(reference.log_loss(truth.flatten(), p.flatten()), rel=1e-5)
    assert set(found) == set(metrics_of_classes(DataSettings(num_labels=classes, multi_label=True)))


def test_the_calibration_error_is_that_of_torchmetrics() -> None:
    """Values of torchmetrics 1.9.0 (15 bins, l1), by which trials of earlier versions were compared."""
    p = [0.02, 0.07, 0.11, 0.2, 0.31, 1 / 3, 0.48, 0.6, 0.66, 0.7, 0.93, 0.94, 1.0, 1.0]
    true = [0, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0]
    p_R1, true_R1 = np.array(p)[:, None], np.array(true, dtype=float)[:, None]
    ece = class_metric("ece", true_R1, true_R1, p_R1, several=True)
    assert ece is not None and ece.value == pytest.approx(0.30523809523809525, abs=1e-15)
    sure, equal = [30, 0, 0], [0, 0, 0]  # one that is sure is right, another wrong
    logits = [[4, 0, -2], [0.5, 0.4, 0.3], sure, sure, equal, [0, 2, 1], [-1, 3, 2.9], [0.2, 0.1, 1.7]]
    logits = torch.tensor([*logits, [0, 2.9, 0], [2.6, 0, 0]])
    found = one_class_metrics(logits, torch.tensor([0, 1, 0, 2, 0, 1, 2, 2, 1, 2]))
    assert found["ece"] == pytest.approx(0.32443976402282715, abs=1e-7)  # torchmetrics added up in fp32


def test_metrics_of_one_guess_and_of_an_absent_class_do_not_warn() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    logits = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)
    found = one_class_metrics(logits, labels)
    assert found["balanced_accuracy"] == 0.5
    assert found["mcc"] == 0
    assert found["auroc"] == 0.5  # of the two classes that are there


@pytest.mark.parametrize("classes", [2, 3])
def test_there_is_no_ranking_of_rows_of_one_class(classes: int) -> None:
    found = one_class_metrics(torch.randn(4, classes), torch.zeros(4, dtype=torch.int64))
    assert math.isnan(found["auroc"])
    several = multi_label_metrics(torch.randn(4, classes), torch.ones(4, classes, dtype=torch.uint8))
    assert math.isnan(several["auroc"])
    assert math.isfinite(found["ece"] + several["ece"])


def test_a_class_nobody_has_counts_in_f1_and_not_in_auroc() -> None:
    labels = torch.tensor([[1, 0], [0, 0]], dtype=torch.uint8)
    found = multi_label_metrics(torch.tensor([[2.0, -1.0], [-2.0, -1.0]]), labels)
    assert (found["f1_macro"], found["accuracy"], found["auroc"]) == (0.5, 1, 1)


def test_scores_that_are_no_numbers_give_no_number() -> None:
    broken = torch.tensor([[math.nan, 0.0], [0.0, 1.0]])
    for found in (
        one_class_metrics(broken, torch.tensor([0, 1])),
        multi_label_metrics(broken, torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)),
    ):
        assert math.isnan(found["auroc"])
        assert math.isnan(found["ece"])
        assert math.isnan(found["loss"])


@pytest.mark.parametrize(
    ("metric", "classes", "multi_label"),
    [("f1", 3, False), ("f1", 2, True), ("mcc", 3, True), ("balanced_accuracy", 1, True)],
)
def test_a_metric_that_the_classes_do_not_have_is_refused(metric: str, classes: int, multi_label: bool) -> None:
    with pytest.raises(ConfigError, match=f"{metric} with {classes} classes") as caught:
        check_metrics(tasks.criteria(num_labels=classes, multi_label=multi_label), [metric])
    assert "f1_macro" in caught.value.allowed
    assert metric not in caught.value.allowed.split(", ")


def test_two_classes_have_every_metric() -> None:
    check_metrics(tasks.criteria(), metrics_of_classes(DataSettings()))


# ---- Thresholds of classes: against every decision that there is, by scikit-learn; ties, rounding, and their limits


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
