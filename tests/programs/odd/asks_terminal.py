"""Ask the terminal for its width, as progress bars do, and standard input for what nobody types."""

import os
import sys

import torch
from torch import nn

_, width = os.popen("stty size").read().split()
print("=" * int(width), sys.stdin.isatty(), repr(sys.stdin.read()))
model = nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
