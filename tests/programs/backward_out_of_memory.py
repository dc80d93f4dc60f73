"""Halve the batch where a backward pass has no room; layers are checkpointed, so it computes them once more."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--reentrant", action="store_true")
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
width, batch = arguments.width, arguments.batch
layers = nn.ModuleList(
    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(arguments.layers)
).to(device)
optimizer = torch.optim.AdamW(layers.parameters())
for _ in range(arguments.steps):
    try:
        hidden = torch.randn(batch, width, device=device, requires_grad=True)
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=arguments.reentrant)
        hidden.square().mean().backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        batch //= 2
    hidden = None
    optimizer.zero_grad()
print(f"batch {batch} in the end")
