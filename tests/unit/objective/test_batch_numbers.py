"""Random numbers that batches draw go on after a checkpoint inside an epoch as if nobody had stopped."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainers
from dryfit.training.own_trainer import BatchNumbers


def trained(folder: Path, *, rows: int, accumulation: int, checkpoint: Path | None = None, connected: bool = True):
    """Train to the end, and return the losses of all steps by their numbers, and all weights."""
    torch.manual_seed(3)
    trial = SimpleNamespace(folder=folder, params={"rate": 3e-3, "dropout": 0.1})
    trainer: Any = trainers.draws(trial, save_steps=1, eval_steps=3)
    trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps = rows, accumulation
    if connected:
        BatchNumbers(trainer, checkpoint).install()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    losses = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
    return losses, torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


@pytest.mark.parametrize(("rows", "accumulation"), [(8, 1), (4, 2), (10, 1)])
def test_training_goes_on_with_the_numbers_that_come_next(rows: int, accumulation: int, tmp_path: Path) -> None:
    losses, weights = trained(tmp_path / "whole", rows=rows, accumulation=accumulation)
    steps = max(losses)
    for step in (1, 3, steps // 2 - 1, steps // 2, steps - 1):  # the last batch of an epoch, and its end, too
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        found, ended = trained(folder, rows=rows, accumulation=accumulation, checkpoint=folder / f"checkpoint-{step}")
        assert found == losses, step
        assert torch.equal(ended, weights), step


def test_without_it_they_would_be_others(tmp_path: Path) -> None:
    losses, _ = trained(tmp_path / "whole", rows=8, accumulation=1, connected=False)
    folder = tmp_path / "whole" / "checkpoint-3"
    assert not (folder / ".dryfit-batch-numbers.pt").exists()
    found, _ = trained(tmp_path / "again", rows=8, accumulation=1, checkpoint=folder, connected=False)
    assert found != losses
    connected, _ = trained(tmp_path / "connected", rows=8, accumulation=1)
    assert connected == losses  # and to look at them changes nothing
