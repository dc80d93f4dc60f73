"""Its model has run before an average of it is made, as where mixed precision is tried first."""

import copy

import torch
from torch import nn

model = nn.Linear(100, 30).to("cuda")
model(torch.ones(4, 100, device="cuda"))
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    model(torch.ones(4, 100, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(weight, alpha=0.1)
