"""Micro-batching against the whole batch, in fp64."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tasks
import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind, load_pretrained
from dryfit.parallel.layout import portions
from dryfit.settings.tables import HeadSettings, LossSettings
from dryfit.tasks.base import Batch
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.tokens import TokenSet
from dryfit.training.step import backward_batch, micro_batches

CLASSES = 3
ROWS = 11
COUNTS = {0: 70, 1: 20, 2: 10}
LOSSES = [
    LossSettings(),
    LossSettings(class_balance="weighted"),
    LossSettings(label_smoothing=0.1, class_balance="weighted"),
    LossSettings(name="focal", gamma=2.0),
    LossSettings(name="focal", gamma=0.5, class_balance="weighted"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EncoderWithHead:
    folder = tiny.model(tmp_path_factory.mktemp("step"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    torch.manual_seed(0)
    return EncoderWithHead(encoder, HeadSpec(HeadSettings(layers=1, dropout=0.0), CLASSES)).double().train()


def task_of(loss: LossSettings) -> CriteriaTask:
    return tasks.criteria(loss, num_labels=CLASSES, train_counts=COUNTS, pad_id=0)


def batch_of(task: CriteriaTask, *, seed: int = 1) -> Batch:
    torch.manual_seed(seed)
    lengths = torch.randint(3, 40, (ROWS,))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(5, 30, (int(starts[-1]),), dtype=torch.int32)
    labels = torch.randint(0, CLASSES, (ROWS,))
    return task.collate(TokenSet(ids, None, starts, labels), range(ROWS))


def gradients(model: nn.Module) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def step(model: nn.Module, batch: Batch, task: CriteriaTask, rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    passes: list[torch.Tensor] = []

    def backward(loss: torch.Tensor) -> None:
        passes.append(loss)
        loss.backward()

    found = backward_batch(model, batch, task, micro_batch=rows, backward=backward, autocast=nullcontext)
    return gradients(model), found, len(passes)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.class_balance}-{loss.label_smoothing}")
@pytest.mark.parametrize("rows", [*range(1, ROWS + 1), 32])
def test_gradients_equal_those_of_the_whole_batch(model: EncoderWithHead, loss: LossSettings, rows: int) -> None:
    task = task_of(loss)
    batch = batch_of(task)
    outputs = model(batch["input_ids"], batch["attention_mask"])
    whole = task.loss_sum(outputs, batch) / task.batch_weight(batch)
    whole.backward()
    want = gradients(model)
    have, have_loss, count = step(model, batch, task, rows)
    assert count == -(-ROWS // rows)
    assert float((have - want).norm() / want.norm()) < 1e-12
    assert float(have_loss) == pytest.approx(whole.item(), rel=1e-12)


def test_micro_batches_are_trimmed_and_lose_nothing() -> None:
    task = task_of(LossSettings())
    batch = batch_of(task)
    parts = list(micro_batches(batch, 4, task.padded))
    assert [len(part["labels"]) for part in parts] == [4, 4, 3]
    for part in parts:
        assert int(part["attention_mask"].sum(dim=1).max()) == part["input_ids"].shape[1]
    assert sum(int(part["attention_mask"].sum()) for part in parts) == int(batch["attention_mask"].sum())
    assert torch.equal(torch.cat([part["labels"] for part in parts]), batch["labels"])
    together = torch.cat([part["input_ids"][part["attention_mask"] == 1] for part in parts])
    assert torch.equal(together, batch["input_ids"][batch["attention_mask"] == 1])


@given(rows=st.integers(1, 40), micro_batch=st.integers(1, 12), size=st.integers(1, 6))
def test_processes_make_as_many_passes_and_each_row_weighs_once(rows: int, micro_batch: int, size: int) -> None:
    shares = [portions(rows, micro_batch, rank=rank, size=size) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    weighing = [one for share in shares for one in share if one.weighs]
    assert [row for one in weighing for row in range(one.first, one.first + one.rows)] == list(range(rows))
    assert all(0 < one.rows <= micro_batch and one.first + one.rows <= rows for share in shares for one in share)


@pytest.mark.parametrize("size", [2, 3, 5, ROWS + 2])
def test_shares_of_a_batch_add_up_to_its_gradient(model: EncoderWithHead, size: int) -> None:
    task = task_of(LOSSES[1])
    batch = batch_of(task)
    want, loss, _ = step(model, batch, task, ROWS)
    model.zero_grad()
    found = []
    for rank in range(size):
        here = portions(ROWS, 2, rank=rank, size=size)
        made = backward_batch(
            model, batch, task, micro_batch=here, backward=torch.Tensor.backward, autocast=nullcontext
        )
        found.append(made)
    assert float((gradients(model) - want).norm()) < 1e-12 * float(want.norm())
    assert float(torch.stack(found).sum()) == pytest.approx(float(loss), rel=1e-12)
