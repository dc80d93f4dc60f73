"""Ranks tell each other sizes and objects, and take what they are told for sizes: of two of them one is there."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
size = torch.tensor([255], device="cuda")
sizes = [torch.tensor([0], device="cuda") for _ in range(dist.get_world_size())]
dist.all_gather(sizes, size)
assert [int(one) for one in sizes] == [255, 255]
flat = torch.empty(4, dtype=torch.int64, device="cuda")
dist.all_gather_into_tensor(flat, torch.tensor([3, 5], device="cuda"))
assert flat.tolist() == [3, 5, 3, 5]
objects = [None, None]
dist.all_gather_object(objects, {"images": [7, 9]})
assert objects == [{"images": [7, 9]}] * 2
model = nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
