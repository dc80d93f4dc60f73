"""Trains a small network of convolutions: ``plain``, ``sync``, ``traced`` or of a ``default_type``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

way = sys.argv[1]
if way == "default_type":
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
model = nn.Sequential(
    *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
if way == "sync":
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = model.cuda()
images = torch.rand(16, 3, 64, 64).cuda()
if way == "default_type":
    images = images * torch.Tensor([1.0]) + torch.Tensor(images).mean()
if "RANK" in os.environ:
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
if way == "traced":
    with torch.no_grad():
        model = torch.jit.trace(model, images)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    model(images).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if way == "default_type":
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.Tensor([1.0]).device.type == torch.zeros(1).device.type == "cpu"
