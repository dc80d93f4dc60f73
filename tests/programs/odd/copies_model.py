"""It keeps copies of its model and of its state."""

import copy

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


averaged = copy.deepcopy(model)
step()
with torch.no_grad():
    for mine, other in zip(averaged.parameters(), model.parameters(), strict=True):
        mine.lerp_(other, 0.1)
state = copy.deepcopy(model.state_dict())
step()
model.load_state_dict(state)
other = nn.Linear(8, 2, device=device)
other.load_state_dict(averaged.state_dict())
other.to("cpu").to(device)
step()
print("copied", next(other.parameters()).device)
