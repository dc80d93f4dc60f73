"""A Lightning module: one callback reports each epoch, and keeps what is needed to go on.

    dryfit init regression --script examples/lightning_module.py
    dryfit tune regression

Needs ``pip install lightning``. Run by itself, the script does the same without a study.
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dryfit

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--rows", type=int, default=400)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--output_dir", default="out")


class Means(lightning.LightningModule):
    """A transformer that learns to take the mean of each vector."""

    def __init__(self, own: argparse.Namespace) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(own.width, 4, 4 * own.width, own.dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, own.layers)
        self.head, self.lr = nn.Linear(own.width, 1), own.lr

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.head(self.encoder(batch[0])).squeeze(-1), batch[1])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """One batch."""
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """One batch of the validation."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Report(lightning.Callback):
    """Reports the validation of each epoch, and writes a checkpoint to go on from."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Validation is done by now."""
        stop = dryfit.report(trainer.callback_metrics["val_loss"], step=trainer.current_epoch)
        new = self.checkpoint.with_suffix(".new")
        trainer.save_checkpoint(new)
        new.replace(self.checkpoint)  # in one step: a kill leaves the old checkpoint or the new one
        dryfit.checkpointed(trainer.current_epoch)
        trainer.should_stop = trainer.should_stop or stop


def loader(own: argparse.Namespace, seed: int, *, shuffle: bool) -> DataLoader:
    """Random vectors with their means: put your own rows here."""
    x = torch.randn(own.rows, own.length, own.width, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.mean(dim=-1)), batch_size=own.batch_size, shuffle=shuffle)


def main() -> None:
    """Train."""
    own = parser.parse_args()
    checkpoint = Path(own.output_dir, "last.ckpt")
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=own.epochs,
        callbacks=[Report(checkpoint)],
        default_root_dir=own.output_dir,
        enable_checkpointing=False,  # the callback does it
        logger=False,
    )
    data = loader(own, 1, shuffle=True), loader(own, 2, shuffle=False)
    trainer.fit(Means(own), *data, ckpt_path=checkpoint if checkpoint.exists() else None)


if __name__ == "__main__":
    main()
