"""A Lightning module, trained in mixed precision with bfloat16 and validated."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--rows", type=int, default=32)
args = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self, width, layers):
        super().__init__()
        self.save_hyperparameters()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.encoder(x)).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def loader(seed):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(args.rows, args.length, args.width, generator=drawn)
    return DataLoader(TensorDataset(x, x.mean(dim=-1)), batch_size=args.batch, shuffle=seed == 0)


lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="auto",
    devices=1,
    precision="bf16-mixed",
    max_epochs=2,
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    default_root_dir=args.output_dir,
)
trainer.fit(Regression(args.width, args.layers), loader(0), loader(1))
