"""It keeps copies of its model and of its state."""

import copy

import torch
from one_layer import device, model, step
from torch import nn

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
