"""A model of one layer and its step: what most scripts of this folder do something strange beside."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def step(rows=4):
    loss = model(torch.randn(rows, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
