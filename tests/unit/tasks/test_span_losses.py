"""The losses of spans against torch's own on each window's tokens alone, in fp64 and with gradients."""

import pytest
import torch
import torch.nn.functional as F

from dryfit.settings.tables import LossSettings
from dryfit.tasks.base import Batch
from dryfit.tasks.spans import SpanLoss, answerable


def drawn(windows: int, length: int, *, seed: int = 0) -> tuple[torch.Tensor, Batch]:
    """Scores of windows with a criterion, a text and padding; a third has no span; null first or last."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.zeros(windows, length, dtype=torch.bool)
    labels = torch.zeros(windows, 2, dtype=torch.int64)
    nulls = torch.zeros(windows, dtype=torch.int64)
    for window in range(windows):
        begin = int(torch.randint(2, 6, (), generator=rng))
        end = int(torch.randint(begin + 4, length - 2, (), generator=rng))
        mask[window, begin:end] = torch.rand(end - begin, generator=rng) < 0.9  # some tokens are white space
        nulls[window] = 0 if window % 2 else end + 1
        picks = mask[window].nonzero()[:, 0]
        pair = picks[torch.randint(len(picks), (2,), generator=rng)].sort().values
        labels[window] = nulls[window] if window % 3 == 0 else pair
    logits = torch.randn(windows, length, 2, dtype=torch.float64, generator=rng, requires_grad=True)
    return logits, {"labels": labels, "text_mask": mask, "nulls": nulls}


def value_and_gradient(value: torch.Tensor, logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    return value.item(), torch.autograd.grad(value, logits, retain_graph=True)[0]


def assert_same(have: torch.Tensor, want: torch.Tensor, logits: torch.Tensor) -> None:
    (value, gradient), (wanted, wanted_gradient) = (value_and_gradient(one, logits) for one in (have, want))
    assert value == pytest.approx(wanted, rel=1e-12)
    assert gradient.isfinite().all()
    assert float((gradient - wanted_gradient).norm()) <= 1e-12 * float(wanted_gradient.norm())
    assert float(wanted_gradient.norm()) > 0


def mean(settings: LossSettings, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    loss = SpanLoss(settings)
    return loss.loss_sum(logits, batch) / loss.batch_weight(batch)


def each(logits: torch.Tensor, batch: Batch):
    """Of each window and end: the scores of the tokens it may be, and which of them it is."""
    valid = answerable(batch)
    for window in range(len(logits)):
        kept = valid[window].nonzero()[:, 0]
        for end in (0, 1):
            target = (kept == batch["labels"][window, end]).nonzero()[0]
            yield logits[window, kept, end].unsqueeze(0), target


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_cross_entropy_is_torchs_on_what_may_be_an_end(smoothing: float) -> None:
    logits, batch = drawn(13, 40)
    terms = [F.cross_entropy(scores, target, label_smoothing=smoothing) for scores, target in each(logits, batch)]
    assert_same(mean(LossSettings(label_smoothing=smoothing), logits, batch), torch.stack(terms).mean(), logits)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_is_the_papers_on_what_may_be_an_end(gamma: float) -> None:
    logits, batch = drawn(13, 40, seed=1)
    terms = []
    for scores, target in each(logits, batch):
        p = scores.softmax(dim=1)[0, target]
        terms.append(-((1 - p) ** gamma) * p.log())
    assert_same(mean(LossSettings(name="focal", gamma=gamma), logits, batch), torch.cat(terms).mean(), logits)


def test_what_may_not_be_an_end_gets_no_gradient_whatever_its_score() -> None:
    logits, batch = drawn(11, 30, seed=7)
    valid = answerable(batch)
    loss = SpanLoss(LossSettings(label_smoothing=0.3))
    (gradient,) = torch.autograd.grad(loss.loss_sum(logits, batch), logits)
    assert (gradient[~valid] == 0).all()
    assert (gradient[valid] != 0).all()
    other = logits.detach().clone()
    other[~valid] = torch.tensor(1e9, dtype=torch.float64)
    assert loss.loss_sum(other, batch).item() == loss.loss_sum(logits, batch).item()
