"""Each loss against a library's own, or its paper's formula, in fp64 and with gradients."""

import math

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from transformers.loss.loss_for_object_detection import sigmoid_focal_loss

from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import LossSettings
from dryfit.tasks.base import Loss
from dryfit.tasks.losses import class_weights, make_loss

COUNTS = {0: 70, 1: 20, 2: 10}
ROWS = 100


def loss_of(classes: int, *, multi_label: bool = False, **settings) -> Loss:
    counts = {label: COUNTS[label] for label in range(classes)}
    return make_loss(
        LossSettings(**settings), num_labels=classes, train_counts=counts, train_rows=ROWS, multi_label=multi_label
    )


def drawn(rows: int, classes: int, *, multi_label: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + classes)
    labels = torch.randint(0, 2, (rows, classes)) if multi_label else torch.randint(0, classes, (rows,))
    return torch.randn(rows, classes, dtype=torch.float64, requires_grad=True), labels


def mean(loss: Loss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    batch = {"labels": labels}
    return loss.loss_sum(logits, batch) / loss.batch_weight(batch)


def assert_same(have: torch.Tensor, want: torch.Tensor, logits: torch.Tensor) -> None:
    gradients = [torch.autograd.grad(value, logits)[0] for value in (have, want)]
    assert have.item() == pytest.approx(want.item(), rel=1e-12)
    assert float((gradients[0] - gradients[1]).norm()) <= 1e-12 * float(gradients[1].norm())
    assert float(gradients[1].norm()) > 0


def effective(counts: list[int], beta: float) -> list[float]:
    """Weights as Cui et al. print them: they add up to the number of classes."""
    raw = [(1 - beta) / (1 - beta**count) for count in counts]
    return [weight * len(raw) / sum(raw) for weight in raw]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("balance", ["none", "weighted", "effective"])
@pytest.mark.parametrize("classes", [2, 3])
def test_cross_entropy_is_torchs_own_mean(classes: int, balance: str, smoothing: float) -> None:
    logits, labels = drawn(11, classes)
    counts = [COUNTS[label] for label in range(classes)]
    weights = {
        "none": [1.0] * classes,
        "weighted": [1 / count for count in counts],
        "effective": effective(counts, 0.9),
    }[balance]
    beta = {"effective_beta": 0.9} if balance == "effective" else {}
    loss = loss_of(classes, class_balance=balance, label_smoothing=smoothing, **beta)
    reference = nn.CrossEntropyLoss(torch.tensor(weights, dtype=torch.float64), label_smoothing=smoothing)
    assert_same(mean(loss, logits, labels), reference(logits, labels), logits)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("alpha", [None, 0.25, 0.9])
def test_focal_loss_of_two_classes_is_retinanets(gamma: float, alpha: float | None) -> None:
    """Softmax over two scores is the sigmoid of their difference."""
    logits, labels = drawn(9, 2)
    difference = (logits[:, 1] - logits[:, 0]).unsqueeze(1)
    targets = labels.unsqueeze(1).double()
    want = sigmoid_focal_loss(difference, targets, num_boxes=9, alpha=-1 if alpha is None else alpha, gamma=gamma)
    assert_same(mean(loss_of(2, name="focal", gamma=gamma, alpha=alpha), logits, labels), want, logits)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_several_classes_is_its_formula(gamma: float) -> None:
    logits, labels = drawn(9, 3)
    p = logits.softmax(-1)[torch.arange(9), labels]
    weights = torch.tensor([1 / COUNTS[label] for label in range(3)], dtype=torch.float64)[labels]
    want = -(weights * (1 - p) ** gamma * p.log()).sum() / weights.sum()
    assert_same(mean(loss_of(3, name="focal", gamma=gamma, class_balance="weighted"), logits, labels), want, logits)


def test_alpha_and_class_weights_multiply() -> None:
    logits, labels = drawn(9, 2)
    p = logits.softmax(-1)[torch.arange(9), labels]
    weights = torch.tensor(effective([70, 20], 0.999), dtype=torch.float64)[labels]
    alpha = torch.tensor([0.7, 0.3], dtype=torch.float64)[labels]
    want = -(weights * alpha * (1 - p) ** 2 * p.log()).sum() / weights.sum()
    loss = loss_of(2, name="focal", alpha=0.3, class_balance="effective")
    assert_same(mean(loss, logits, labels), want, logits)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_of_several_labels_is_torchs_binary_cross_entropy(classes: int, smoothing: float) -> None:
    logits, labels = drawn(11, classes, multi_label=True)
    targets = labels.double() * (1 - smoothing) + 0.5 * smoothing
    want = nn.BCEWithLogitsLoss()(logits, targets)
    assert_same(mean(loss_of(classes, multi_label=True, label_smoothing=smoothing), logits, labels), want, logits)


def test_weights_of_several_labels_are_those_of_two_classes_each() -> None:
    """With one class the loss is that of two classes, also in the form that torch calls ``pos_weight``."""
    logits, labels = drawn(11, 1, multi_label=True)
    loss = loss_of(1, multi_label=True, class_balance="weighted")  # 30 rows without, 70 with
    pos_weight = torch.tensor([30 / 70], dtype=torch.float64)
    sums = nn.BCEWithLogitsLoss(pos_weight=pos_weight, reduction="sum")(logits, labels.double())
    normaliser = (labels.double() * (30 / 70) + (1 - labels)).sum()
    assert_same(mean(loss, logits, labels), sums / normaliser, logits)
    both = torch.cat([torch.zeros_like(logits), logits], dim=1)
    two = make_loss(
        LossSettings(class_balance="weighted"),
        num_labels=2,
        train_counts={0: 30, 1: 70},
        train_rows=ROWS,
        multi_label=False,
    )
    assert_same(mean(loss, logits, labels), mean(two, both, labels[:, 0]), logits)


@pytest.mark.parametrize("balance", ["weighted", "effective"])
def test_each_class_of_several_has_the_same_share(balance: str) -> None:
    """A rare class is heard as much as a common one: over all training rows the weights of each add up to the same."""
    present = torch.tensor([COUNTS[label] for label in range(3)], dtype=torch.float64)
    weights = class_weights(torch.stack([ROWS - present, present], dim=1), LossSettings(class_balance=balance))
    assert (weights[:, 0] * (ROWS - present) + weights[:, 1] * present).tolist() == pytest.approx([ROWS] * 3)
    assert bool((weights[1:, 1] > weights[1:, 0]).all())  # those that are rarer than their absence


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_focal_loss_of_several_labels_is_retinanets(alpha: float | None) -> None:
    logits, labels = drawn(9, 3, multi_label=True)
    want = sigmoid_focal_loss(logits, labels.double(), num_boxes=9, alpha=-1 if alpha is None else alpha, gamma=2)
    assert_same(mean(loss_of(3, multi_label=True, name="focal", alpha=alpha), logits, labels), want, logits)


def test_class_weights_are_those_scikit_learn_calls_balanced() -> None:
    labels = [0] * 70 + [1] * 20 + [2] * 10
    want = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    found = class_weights(torch.tensor([70.0, 20.0, 10.0]).double(), LossSettings(class_balance="weighted"))
    assert found.tolist() == pytest.approx(want.tolist(), rel=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999999999])
def test_effective_weights_lie_between_none_and_inverse_frequencies(beta: float) -> None:
    counts = torch.tensor([70.0, 20.0, 10.0]).double()
    found = class_weights(counts, LossSettings(class_balance="effective", effective_beta=beta))
    ratio = float(found[2] / found[0])
    assert ratio == pytest.approx({0.0: 1.0, 0.9: (1 - 0.9**70) / (1 - 0.9**10), 0.999999999: 7.0}[beta], rel=1e-6)
    assert float((found * counts).sum()) == pytest.approx(100)


def test_a_class_without_rows_weighs_nothing() -> None:
    for balance in ("weighted", "effective"):
        found = class_weights(torch.tensor([5.0, 0.0]).double(), LossSettings(class_balance=balance))
        assert found.tolist() == [1, 0]


def test_alpha_of_three_classes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss\.alpha = 0\.25.*data\.num_labels is 3"):
        loss_of(3, name="focal", alpha=0.25)


@pytest.mark.parametrize("multi_label", [False, True])
def test_focal_gradient_is_finite_where_the_guess_is_certain(multi_label: bool) -> None:
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    labels = torch.tensor([[1, 0], [1, 0]]) if multi_label else torch.tensor([0, 0])
    loss = loss_of(2, multi_label=multi_label, name="focal", gamma=0.5).loss_sum(logits, {"labels": labels})
    loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert math.isfinite(loss.item())
