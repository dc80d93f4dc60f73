"""Its model is compiled."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model)
for _ in range(3):
    loss = compiled(torch.randn(args.rows, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("compiled")
