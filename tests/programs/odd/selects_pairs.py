"""A loss over pairs that the model's outputs select: how many there are depends on values."""

import torch
from torch import nn


class Model(nn.Linear):
    def named_parameters(self, prefix="", recurse=True):  # as a library has it: torch's takes another argument
        return super().named_parameters(prefix, recurse)


model = Model(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    out = model(torch.randn(4096, 64, device="cuda"))
    left, right = (out @ out.T > 0.5).nonzero().T
    (out[left] * out[right]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
