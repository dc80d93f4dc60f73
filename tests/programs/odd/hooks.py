"""Allocates within a backward pass: in a function's own pass, in a tensor's hook, and in a parameter's."""

import torch
from torch import nn

MIB = 2**20
kept = []


class Twice(torch.autograd.Function):
    """Twice its input; its backward pass keeps a buffer."""

    @staticmethod
    def forward(ctx, given):
        return given * 2

    @staticmethod
    def backward(ctx, gradient):
        kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))  # in a function's pass
        return gradient * 2


def of_parameter(_parameter):
    """Keep a buffer, as what sends gradients in buckets does."""
    kept.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))  # in a parameter's hook


def of_tensor(_gradient):
    """Keep a buffer."""
    kept.append(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"))  # of a tensor's hook


model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
optimizer = torch.optim.SGD(model.parameters())
model[0].weight.register_post_accumulate_grad_hook(of_parameter)
hidden = model(torch.randn(64, 512, device="cuda"))
hidden.register_hook(of_tensor)
Twice.apply(hidden).sum().backward()
optimizer.step()
