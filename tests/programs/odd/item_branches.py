"""What it does depends on values that only the device has."""

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
