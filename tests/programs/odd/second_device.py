"""It wants a second device where there is one."""

import torch
from one_layer import device, step

step()
other = "cuda:1" if device == "cuda" else "cpu"
print(torch.zeros(4, device=other).sum().item())
