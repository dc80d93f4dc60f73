"""A training script without a Trainer: a plain loop of PyTorch that runs by itself, and that dryfit searches as it is.

    python examples/train_loop.py --lr 0.01
    dryfit init loop --script examples/train_loop.py -- --epochs 5
    dryfit tune loop

The two lines with ``dryfit`` report and note checkpoints; run by itself, the script does the same without them.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import dryfit

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--hidden", type=int, default=32, help="width of the hidden layer")
parser.add_argument("--activation", choices=("relu", "gelu"), default="relu")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--output_dir", default="out")
arguments = parser.parse_args()

torch.manual_seed(0)
points, new_points = torch.rand(2, 512, 2) * 4 - 2
labels, new_labels = ((one.norm(dim=1) < 1.2).float() for one in (points, new_points))
activation = nn.ReLU() if arguments.activation == "relu" else nn.GELU()
model = nn.Sequential(nn.Linear(2, arguments.hidden), activation, nn.Linear(arguments.hidden, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

folder = Path(arguments.output_dir)
folder.mkdir(parents=True, exist_ok=True)
saved, first = folder / "state.pt", 1
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    first = state["epoch"] + 1

for epoch in range(first, arguments.epochs + 1):
    for batch in torch.randperm(len(points)).split(32):
        loss = binary_cross_entropy_with_logits(model(points[batch])[:, 0], labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores = model(new_points)[:, 0]
    value = float(binary_cross_entropy_with_logits(scores, new_labels))
    accuracy = float(((scores > 0) == (new_labels > 0)).float().mean())
    print(f"epoch {epoch}: loss {value:.4f}, accuracy {accuracy:.3f}")
    stop = dryfit.report(value, step=epoch, metrics={"accuracy": accuracy})
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save({**state, "random": torch.get_rng_state()}, folder / "state.new")
    (folder / "state.new").replace(saved)  # in one step: a kill leaves the old state or the new one
    dryfit.checkpointed(epoch)
    if stop:
        break
