"""Each step has an optimizer of its own; then gradients are looked at, or asked for. Every one must be there."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
weights = list(model.parameters())


def loss():
    return model(torch.randn(512, 64, device=device)).square().mean()


for _ in range(8):
    optimizer = torch.optim.SGD(weights, lr=0.1)
    loss().backward()
    if any(weight.grad is None for weight in weights):
        raise SystemExit("a gradient is missing")
    optimizer.step()
    optimizer.zero_grad()

optimizer = torch.optim.Adam(weights)
for _ in range(8):
    optimizer.zero_grad()
    loss().backward()
    norms = [weight.grad.norm() for weight in weights]
for _ in range(4):
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    for _ in range(8):
        for weight, gradient in zip(weights, torch.autograd.grad(loss(), weights), strict=True):
            weight.grad.add_(gradient)
    optimizer.step()
