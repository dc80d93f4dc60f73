"""Trains in ``training`` mode, in ``evaluation`` mode, or in that from the ``second`` epoch on."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(64, 8).to(device)
optimizer = torch.optim.Adam(model.parameters())
rows = DataLoader(TensorDataset(torch.randn(96, 64), torch.randint(0, 8, (96,))), 32)
way = sys.argv[1] if len(sys.argv) > 1 else "training"
if way == "evaluation":
    model.eval()
for _epoch in range(3):
    for inputs, labels in rows:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for inputs, _ in rows:
            model(inputs.to(device))
    model.train(way == "training")
