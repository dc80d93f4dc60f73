"""What it does depends on values that only the device has."""

import torch
from one_layer import step

best = float("inf")
for number in range(4):
    loss = step()
    if loss.item() < best:
        best = loss.item()
    if torch.isnan(loss):
        raise FloatingPointError(f"step {number}: the loss is not a number")
    if (loss > 1e9).any():
        print("too large")
print(f"best {best:.3f}")
