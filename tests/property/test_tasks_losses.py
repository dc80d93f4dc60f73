"""A batch may be cut anywhere: sums over its parts, divided by the whole batch's normaliser, are its loss."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dryfit.settings.tables import LossSettings
from dryfit.tasks.base import MODEL_INPUTS, Batch
from dryfit.tasks.losses import make_loss
from dryfit.training.step import backward_batch
from thinning import examples

BALANCES = st.sampled_from(["none", "weighted", "effective"])
FRACTIONS = st.floats(0.01, 0.99)


@st.composite
def losses(draw: st.DrawFn, *, alpha: bool) -> LossSettings:
    balance = draw(BALANCES)
    table = {"class_balance": balance}
    if balance == "effective":
        table["effective_beta"] = draw(FRACTIONS)
    if draw(st.booleans()):
        return LossSettings(**table, label_smoothing=draw(st.sampled_from([0.0, 0.1, 0.7])))
    weight = draw(st.none() | FRACTIONS) if alpha else None
    return LossSettings(**table, name="focal", gamma=draw(st.floats(0, 5)), alpha=weight)


class Rows(torch.nn.Module):
    """Scores that are weights themselves: their gradients are those of the loss."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(scores)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.scores[input_ids[:, 0]]


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_micro_batches_add_up_to_the_whole_batch(data: st.DataObject) -> None:
    multi_label = data.draw(st.booleans())
    classes, rows = data.draw(st.integers(1 if multi_label else 2, 5)), data.draw(st.integers(1, 12))
    table = data.draw(losses(alpha=multi_label or classes == 2))
    counts = {label: data.draw(st.integers(1, 50)) for label in range(classes)}
    loss = make_loss(table, num_labels=classes, train_counts=counts, train_rows=51, multi_label=multi_label)
    task: Any = SimpleNamespace(
        inputs=MODEL_INPUTS, padded=MODEL_INPUTS, batch_weight=loss.batch_weight, loss_sum=loss.loss_sum
    )
    torch.manual_seed(data.draw(st.integers(0, 999)))
    labels = torch.randint(0, 2, (rows, classes)) if multi_label else torch.randint(0, classes, (rows,))
    scores = torch.randn(rows, classes, dtype=torch.float64) * data.draw(st.sampled_from([0.1, 1.0, 20.0]))
    ids = torch.arange(rows).unsqueeze(1)
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def gradient(micro_batch: int) -> tuple[float, torch.Tensor]:
        model = Rows(scores)
        step = backward_batch(
            model, batch, task, micro_batch=micro_batch, backward=torch.Tensor.backward, autocast=torch.enable_grad
        )
        assert model.scores.grad is not None
        return float(step), model.scores.grad

    whole = Rows(scores)
    mean = loss.loss_sum(whole(ids, ids), batch) / loss.batch_weight(batch)
    mean.backward()
    assert whole.scores.grad is not None
    for micro_batch in range(1, rows + 1):
        value, found = gradient(micro_batch)
        assert abs(value - mean.item()) <= 1e-12 * abs(mean.item())
        assert float((found - whole.scores.grad).norm()) <= 1e-12 * float(whole.scores.grad.norm())
