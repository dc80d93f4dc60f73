"""Micro-batches that repeat one before them in their step are left out, and counted all the same."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dryfit.gpu import left_out
from dryfit.gpu.left_out import RepeatedMicroBatches
from dryfit.gpu.work import WorkCounter


class Trainer:
    """As transformers' as far as it matters."""

    def __init__(self, world_size: int = 1) -> None:
        self.args = SimpleNamespace(world_size=world_size, device=torch.device("cpu"))
        self.state = SimpleNamespace(global_step=0, train_batch_size=2)
        self.ran: list[tuple[int, ...]] = []

    def training_step(self, model: Any, inputs: Any) -> torch.Tensor:
        if inputs.get("fails"):
            raise torch.OutOfMemoryError
        self.ran.append(tuple(inputs["input_ids"].shape) if "input_ids" in inputs else ())
        self.work.add(Counter({len(self.ran): 1}))
        return torch.ones(())

    work: WorkCounter


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[Trainer]:
    class Own(Trainer):
        training_step = Trainer.training_step
        work = WorkCounter()

    module = SimpleNamespace(Trainer=Own)
    monkeypatch.setattr(left_out, "when_imported", lambda name, act: act(module))
    return Own


def steps(trainer: Trainer, *shapes: tuple[int, int]) -> None:
    for shape in shapes:
        trainer.training_step(None, {"input_ids": torch.zeros(shape)})


def test_after_the_first_only_larger_ones_run(trainer: type[Trainer]) -> None:
    repeated = RepeatedMicroBatches(trainer.work)
    repeated.install()
    one = trainer()
    steps(one, (2, 8), (2, 8), (2, 8), (1, 8), (2, 9), (2, 9), (3, 2))
    assert one.ran == [(2, 8), (2, 8), (2, 9), (3, 2)]
    assert repeated.left_out == 3
    # The second ran for two that were left out, the third for one.
    assert trainer.work.so_far() == Counter({1: 1, 2: 3, 3: 2, 4: 1})
    one.state.global_step = 1
    steps(one, (1, 1), (1, 1), (1, 1))
    assert one.ran[4:] == [(1, 1), (1, 1)]


def test_ranks_that_send_gradients_and_batches_without_shapes_run_whole(trainer: type[Trainer]) -> None:
    repeated = RepeatedMicroBatches(trainer.work)
    repeated.install()
    one = trainer(world_size=2)
    steps(one, (2, 8), (2, 8), (2, 8))
    other = trainer()
    for _ in range(3):
        other.training_step(None, {"prompts": ["a"]})
    assert len(one.ran) == len(other.ran) == 3 and not repeated.left_out


def test_an_error_begins_the_step_anew(trainer: type[Trainer]) -> None:
    RepeatedMicroBatches(trainer.work).install()
    one = trainer()
    steps(one, (4, 8), (4, 8), (4, 8))
    with pytest.raises(torch.OutOfMemoryError):
        one.training_step(None, {"fails": True, "input_ids": torch.zeros(8, 8)})
    steps(one, (2, 8), (2, 8), (2, 8))
    assert one.ran == [(4, 8), (4, 8), (2, 8), (2, 8)]


def test_the_second_of_a_step_is_the_largest_that_was_met(trainer: type[Trainer]) -> None:
    RepeatedMicroBatches(trainer.work, largest=True).install()
    one = trainer()
    steps(one, (2, 9), (2, 5), (2, 8), (2, 9))
    one.state.global_step = 1
    steps(one, (2, 4), (2, 6), (1, 9), (3, 9))
    assert one.ran == [(2, 9), (2, 9), (2, 4), (2, 9), (3, 9)]
    one.state.train_batch_size = 1  # of an optimizer without room, as `auto_find_batch_size` goes on
    steps(one, (1, 9), (1, 8), (1, 7))
    assert one.ran[5:] == [(1, 9), (1, 9)]
