"""A small training script: what is estimated."""

import argparse

import torch
from torch import nn


def train(width: int, rows: int, device: str = "cuda") -> float:
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(rows, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    train(arguments.width, arguments.rows)
