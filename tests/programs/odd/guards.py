"""Checks, loops and optimizers that depend on values which only a device has; none of them ends the script."""

import sys

import torch
from accelerate import init_empty_weights
from torch import nn

with init_empty_weights():
    assert nn.Linear(8, 2).weight.device.type == "meta"
model = nn.Linear(8, 2).cuda()
model.scale = nn.Parameter(torch.empty(2))
nn.init.uniform_(model.scale, 1, 2)
model.cuda()
optimizer = torch.optim.LBFGS(model.parameters(), history_size=8)
data = torch.randn(4, 8, device="cuda")


def closure():
    optimizer.zero_grad()
    loss = (model(data) * model.scale).square().mean()
    assert (loss > 0.5) and not (loss > 1.5)
    if not 1 < loss.item() < 2:
        sys.exit(4)
    if torch.isnan(loss) or (loss > 1e4).any():
        raise FloatingPointError
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)
assert len(optimizer.state[model.weight]["old_dirs"]) == 8
drawn = torch.randn(4, device="cuda")
while (drawn.abs() > 1).any():
    drawn = torch.where(drawn.abs() > 1, torch.randn_like(drawn), drawn)
print("done")
