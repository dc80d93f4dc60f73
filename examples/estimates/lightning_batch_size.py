"""Lightning: a BatchSizeFinder that asks dryfit in the place of running until memory is out."""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch.utils.data import DataLoader, TensorDataset

import dryfit

SCRIPT = Path(__file__).with_name("train.py")
CARD = "2GiB"


class EstimatedBatchSize(BatchSizeFinder):
    """Doubles the batch while it fits a card, as the mode `power` does; nothing is trained for it."""

    def scale_batch_size(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        size = self._init_val
        while 2 * size <= self._max_val and dryfit.fits(
            SCRIPT, {"width": pl_module.width, "rows": 2 * size}, device=CARD
        ):
            size *= 2
        setattr(pl_module, self._batch_arg_name, size)
        self.optimal_batch_size = size


class Model(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.batch_size = width, 1
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=self.batch_size)


if __name__ == "__main__":
    finder = EstimatedBatchSize(init_val=8_192, max_val=65_536)
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", callbacks=[finder], logger=False, enable_checkpointing=False
    )
    trainer.fit(Model(2_000))
    print("batch size", finder.optimal_batch_size)
