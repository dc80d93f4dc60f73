"""Parameters that FSDP2 shards are initialised: some initialisers draw again until their values are good."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
with torch.device("meta"):
    model = nn.Linear(1024, 1024)
fully_shard(model)
model.to_empty(device="cuda")
nn.init.trunc_normal_(model.weight, std=0.02, a=-0.06, b=0.06)
weight = model.weight
with torch.no_grad():
    while (weight.abs() > 2).any():
        weight.mul_(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
