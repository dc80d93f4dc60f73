"""The loss of a class and of a span at once against torch's own, in fp64, with gradients, whole and in parts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dryfit.settings.choices import Weighting
from dryfit.settings.tables import LossSettings, MultitaskSettings
from dryfit.tasks.base import Batch
from dryfit.tasks.joint import TRAINS_CLASS, TRAINS_SPAN, TwoLosses
from dryfit.tasks.losses import make_loss
from dryfit.tasks.tokens import CLASSES
from dryfit.training.step import backward_batch

WINDOWS, LENGTH, COUNTS = 23, 17, {0: 40, 1: 9, 2: 21}


class Scores(nn.Module):
    """A model whose outputs are its parameters, so that their gradients are those of the loss."""

    def __init__(self, *, learned: bool, classes: int = 3) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(4)
        draw = {"dtype": torch.float64, "generator": rng}
        self.classes = nn.Parameter(torch.randn(WINDOWS, classes, **draw))
        self.spans = nn.Parameter(torch.randn(WINDOWS, LENGTH, 2, **draw) * 3)
        self.logs = nn.Parameter(torch.tensor([0.7, -1.3], dtype=torch.float64)) if learned else None

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = input_ids[:, 0]
        outputs = (self.classes[rows], self.spans[rows])
        return outputs if self.logs is None else (*outputs, self.logs.expand(len(rows), 2))

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None]


def drawn(*, roles: bool = False, several: bool = False) -> Batch:
    rng = torch.Generator().manual_seed(9)

    def integers(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=rng)

    text = integers(4, WINDOWS, LENGTH) > 0
    text[:, 0], text[:, 1] = False, True
    picks = [row.nonzero()[:, 0] for row in text]
    labels = torch.stack([row[integers(len(row), 2)].sort().values for row in picks])
    labels[::3] = 0
    ids = torch.arange(WINDOWS)[:, None].expand(-1, LENGTH)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "text_mask": text.long(),
        "nulls": torch.zeros(WINDOWS, dtype=torch.int64),
        "labels": labels,
        CLASSES: integers(2, WINDOWS, 3) if several else integers(3, WINDOWS),
    }
    if roles:
        batch[TRAINS_CLASS], batch[TRAINS_SPAN] = integers(2, WINDOWS), integers(2, WINDOWS)
        # The first micro-batches train no class, and so divide nothing by their own weight.
        batch[TRAINS_CLASS][:7] = 0
    return batch


class Losses:
    """The two losses, as a training step asks for them."""

    inputs = ("input_ids",)
    padded = ("input_ids", "attention_mask", "text_mask")

    def __init__(self, multitask: dict[str, Any], loss: dict[str, Any], *, several: bool = False) -> None:
        table = LossSettings(**loss)
        classes = make_loss(table, num_labels=3, train_counts=COUNTS, train_rows=70, multi_label=several)
        self._losses = TwoLosses(MultitaskSettings(**multitask), classes, table)
        self.batch_weight, self.loss_sum = self._losses.batch_weight, self._losses.loss_sum


Found = tuple[float, list[torch.Tensor]]


def backward(model: Scores, losses: Losses, batch: Batch, micro_batch: int = WINDOWS) -> Found:
    model.zero_grad()
    found = backward_batch(
        model,
        batch,
        losses,
        micro_batch=micro_batch,
        backward=lambda loss: loss.backward(),
        autocast=torch.enable_grad,
    )
    return float(found), model.gradients()


def reference(model: Scores, batch: Batch, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Both mean losses over the windows that train each, window by window and by torch's own cross entropy."""
    trains_class = batch.get(TRAINS_CLASS, torch.ones(WINDOWS)).bool()
    trains_span = batch.get(TRAINS_SPAN, torch.ones(WINDOWS)).bool()
    classes = F.cross_entropy(
        model.classes[trains_class], batch[CLASSES][trains_class], label_smoothing=smoothing, reduction="mean"
    )
    spans = []
    for window in trains_span.nonzero()[:, 0].tolist():
        valid = batch["text_mask"][window].bool().clone()
        valid[0] = True
        kept = valid.nonzero()[:, 0]
        for end in (0, 1):
            target = (kept == batch["labels"][window, end]).nonzero()[0]
            scores = model.spans[window, kept, end].unsqueeze(0)
            spans.append(F.cross_entropy(scores, target, label_smoothing=smoothing))
    return classes, torch.stack(spans).mean()


def assert_same(have: Found, want: Found) -> None:
    assert have[0] == pytest.approx(want[0], rel=1e-12)
    assert len(have[1]) == len(want[1])
    for gradient, wanted in zip(have[1], want[1], strict=True):
        assert gradient.isfinite().all()
        assert float(wanted.norm()) > 0
        assert float((gradient - wanted).norm()) <= 1e-12 * float(wanted.norm())


@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighting", list(Weighting))
def test_it_is_the_weighted_sum_of_both_means(weighting: Weighting, smoothing: float, roles: bool) -> None:
    learned = weighting is Weighting.UNCERTAINTY
    model, batch = Scores(learned=learned), drawn(roles=roles)
    losses = Losses({"criteria_weight": 0.3, "weighting": weighting}, {"label_smoothing": smoothing})
    have = backward(model, losses, batch)
    model.zero_grad()
    classes, spans = reference(model, batch, smoothing)
    if model.logs is None:
        want = 0.3 * classes + 0.7 * spans
    else:  # Kendall et al. 2018, equation 10: loss / sigma^2 + log sigma, with s = log sigma^2
        sigma = (model.logs / 2).exp()
        want = classes / sigma[0] ** 2 + sigma[0].log() + spans / sigma[1] ** 2 + sigma[1].log()
    want.backward()
    assert_same(have, (want.item(), model.gradients()))


@pytest.mark.parametrize("micro_batch", [1, 4, 7, 22])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "table", [{"label_smoothing": 0.2}, {"name": "focal", "class_balance": "weighted"}, {"class_balance": "effective"}]
)
@pytest.mark.parametrize("weighting", list(Weighting))
def test_micro_batches_add_up_to_the_whole_batch(
    weighting: Weighting, table: dict[str, Any], several: bool, micro_batch: int
) -> None:
    model, batch = Scores(learned=weighting is Weighting.UNCERTAINTY), drawn(roles=True, several=several)
    losses = Losses({"criteria_weight": 0.3, "weighting": weighting}, table, several=several)
    assert_same(backward(model, losses, batch, micro_batch), backward(model, losses, batch))


@pytest.mark.parametrize("weighting", list(Weighting))
def test_a_batch_that_trains_one_part_alone(weighting: Weighting) -> None:
    """Its other part adds nothing, not even a variance's own term, and no gradient of it is a number divided by 0."""
    model, batch = Scores(learned=weighting is Weighting.UNCERTAINTY), drawn(roles=True)
    batch[TRAINS_CLASS] = torch.zeros_like(batch[TRAINS_CLASS])
    losses = Losses({"weighting": weighting}, {})
    assert losses.batch_weight(batch)[0] == 1
    loss, gradients = backward(model, losses, batch)
    assert loss > 0
    assert gradients[0].count_nonzero() == 0
    assert gradients[1].norm() > 0
    if model.logs is not None:
        assert gradients[2][0] == 0
        assert gradients[2][1] != 0


def test_alpha_weighs_classes_and_no_positions() -> None:
    batch = drawn()
    batch[CLASSES] = batch[CLASSES].clamp_max(1)
    model = Scores(learned=False, classes=2)
    found = []
    for alpha in (0.5, 0.9):
        table = LossSettings(name="focal", alpha=alpha)
        classes = make_loss(table, num_labels=2, train_counts={0: 1, 1: 1}, train_rows=2, multi_label=False)
        losses = TwoLosses(MultitaskSettings(), classes, table)
        found.append(losses.loss_sum(model(batch["input_ids"]), batch))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
