import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import tasks
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import DataSettings
from dryfit.settings.task_facts import metrics_of_classes
from dryfit.tasks.answers import check_metrics, multi_label_metrics, one_class_metrics
from dryfit.tasks.row_metrics import class_metric
from dryfit.tasks.tokens import TokenSet


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
