"""A loop that keeps its losses, and by them every graph that it ever made."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(args.width, 4 * args.width), nn.ReLU(), nn.Linear(4 * args.width, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(args.steps):
    x = torch.randn(args.batch, args.width, device=device)
    hidden = model[1](model[0](x))  # kept by the graph
    loss = model[2](hidden).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)
print(f"mean loss {torch.stack(losses).mean().item():.3f}")
