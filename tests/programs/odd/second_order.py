"""LBFGS with a line search, whose history is as long as it may be only after many iterations."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Tanh(), nn.Linear(1024, 8, bias=False)).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), history_size=20, line_search_fn="strong_wolfe")
inputs, labels = torch.randn(64, 1024).cuda(), torch.randint(0, 8, (64,)).cuda()


def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


for _ in range(200):
    optimizer.step(closure)
