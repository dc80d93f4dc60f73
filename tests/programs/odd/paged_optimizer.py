"""Its optimizer's state is paged, as torchtune's recipes have it."""

import argparse

import bitsandbytes
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--bits", type=int, default=32)
args = parser.parse_args()

model = nn.Linear(1024, 1024, bias=False).cuda()
kind = bitsandbytes.optim.PagedAdamW8bit if args.bits == 8 else bitsandbytes.optim.PagedAdamW
optimizer = kind(model.parameters(), lr=1e-4)
for _ in range(3):
    model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
