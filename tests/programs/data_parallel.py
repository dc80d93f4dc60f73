"""Train on several GPUs: DistributedDataParallel, or FSDP2 with sharded parameters. Run it with torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--shard", action="store_true")
parser.add_argument("--find-unused", action="store_true")
arguments = parser.parse_args()

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
width = arguments.width
layers = [
    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(arguments.layers)
]
model: nn.Module = nn.Sequential(*layers).to(device)
if arguments.shard:
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model, find_unused_parameters=arguments.find_unused)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = TensorDataset(torch.randn(256, width))
loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows))
for (batch,) in loader:
    loss = model(batch.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
total = loss.detach().clone()
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item() / dist.get_world_size():.3f}")
del loss, model, optimizer  # the reducer has to go before its group: at the interpreter's end its threads may not
dist.destroy_process_group()
