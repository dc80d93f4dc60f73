"""Rows that are repeated as often as values say: nobody knows how many there are."""

import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    rows = torch.randn(4096, 64, device="cuda")
    times = rows[:, 0].abs().long()
    known = rows.repeat_interleave(torch.full((4096,), 3, device="cuda"), 0)
    assert known.shape == rows.repeat_interleave(times, 0, output_size=3 * 4096).shape == (3 * 4096, 64)
    assert torch.bincount(torch.tensor([0, 7, 7], device="cuda")).shape == (8,)
    assert torch.bincount(times, minlength=20).shape == (20,)
    model(rows).repeat_interleave(times, 0).sum().backward()  # how many rows there are
    optimizer.step()
    optimizer.zero_grad()
