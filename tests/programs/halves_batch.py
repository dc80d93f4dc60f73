"""A loop that catches an out-of-memory error and goes on with half the batch."""

import argparse
import gc

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)))
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
batch, step = args.batch, 0
while step < args.steps:
    try:
        x = torch.randn(batch, args.width, device=device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
    except torch.OutOfMemoryError as error:
        print(f"{batch} rows: {error}")
        x = loss = None
        batch //= 2
    optimizer.zero_grad()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
print(f"trained on {batch} rows at a time")
