import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from sklearn.utils.class_weight import compute_class_weight

from dryfit.core.settings import LossSettings
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.losses import class_weights
from dryfit.tasks.tokens import TokenSet


def task_of(loss: LossSettings, classes: int = 2) -> CriteriaTask:
    counts = {label: 10 * (label + 1) for label in range(classes)}
    return CriteriaTask(loss, num_labels=classes, train_counts=counts, pad_id=0)


def split_of(labels: torch.Tensor) -> TokenSet:
    return TokenSet(torch.zeros(len(labels), dtype=torch.int32), None, torch.arange(len(labels) + 1), labels)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_scikit_learns(classes: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, classes, (57,))
    logits = torch.randn(57, classes)
    found = task_of(LossSettings(), classes).metrics(logits, split_of(labels))
    truth, guess = labels.numpy(), logits.argmax(-1).numpy()
    assert found["f1_macro"] == pytest.approx(reference.f1_score(truth, guess, average="macro"))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(truth, guess))
    assert found["mcc"] == pytest.approx(reference.matthews_corrcoef(truth, guess))
    assert found["loss"] == pytest.approx(reference.log_loss(truth, logits.double().softmax(-1).numpy()), rel=1e-5)
    if classes == 2:
        assert found["f1"] == pytest.approx(reference.f1_score(truth, guess))
    else:
        assert "f1" not in found


def test_metrics_of_one_guess_and_of_an_absent_class_do_not_warn() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    logits = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)
    found = task_of(LossSettings(), 3).metrics(logits, split_of(labels))
    assert found["balanced_accuracy"] == 0.5
    assert found["mcc"] == 0


def test_class_weights_are_those_scikit_learn_calls_balanced() -> None:
    labels = torch.tensor([0] * 30 + [1] * 10 + [2] * 5)
    want = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert class_weights({0: 30, 1: 10, 2: 5}, 3).tolist() == pytest.approx(want.tolist())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_is_its_formula(gamma: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 2, dtype=torch.float64)
    labels = torch.randint(0, 2, (9,))
    p = logits.softmax(-1)[torch.arange(9), labels]
    want = -((1 - p) ** gamma * p.log()).sum()
    have = task_of(LossSettings(name="focal", gamma=gamma)).loss_sum(logits, {"labels": labels})
    assert float(have) == pytest.approx(float(want), rel=1e-12)


def test_focal_gradient_is_finite_where_the_guess_is_certain() -> None:
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    loss = task_of(LossSettings(name="focal", gamma=0.5)).loss_sum(logits, {"labels": torch.tensor([0, 0])})
    loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(loss)
