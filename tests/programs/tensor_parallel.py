"""Split a model's layers over ranks, as PyTorch's examples do: by columns and rows, sequences, or by stages."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

way, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
width, rows, classes = 512, 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
model: nn.Module = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(width, classes)).cuda()
if way == "stages":
    dist.init_process_group("nccl")
    mine = nn.Sequential(*list(model)[: len(model) // ranks])
    stage = PipelineStage(mine, 0, ranks, torch.device("cuda"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    for _ in range(4):
        schedule.step(torch.randn(rows, width, device="cuda"))
        optimizer.step()
        optimizer.zero_grad()
    sys.exit()
if way == "both":
    mesh = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
else:
    tp = init_device_mesh("cuda", (ranks,))
for number, block in enumerate(list(model)[:-1]):
    plan: dict[str, object] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if way == "sequence":
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(0) if number else Replicate(), desired_input_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
    parallelize_module(block, tp, plan)
last = {
    "4": ColwiseParallel(
        input_layouts=Shard(0) if way == "sequence" else Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
}
parallelize_module(model, tp, last)
if way == "both":
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for _ in range(4):
    torch.manual_seed(1)
    x, labels = torch.randn(rows, width, device="cuda"), torch.randint(classes, (rows,), device="cuda")
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
