"""It evaluates batches that it draws by hand, before it trains and after each step, as nanoGPT does."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=10)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


@torch.no_grad()
def evaluate():
    model.eval()
    losses = [model(torch.randn(512, 256, device=device)).square().mean().item() for _ in range(args.batches)]
    model.train()
    return sum(losses) / len(losses)


for _ in range(3):
    print("evaluated", evaluate())
    model(torch.randn(8, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
