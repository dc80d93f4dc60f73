"""Trains a layer, and asks ``nvidia-smi`` about the device."""

import subprocess

import torch
from torch import nn


def smi(*options):
    return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True).stdout


query = smi("-i", "0", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")
name, total, used = query.split(", ")
free, capacity = torch.cuda.mem_get_info()
assert name == torch.cuda.get_device_name()
assert (int(total), int(used)) == (capacity // 2**20, (capacity - free) // 2**20) and int(used) > 0
assert smi("-L").count("\n") == torch.cuda.device_count()
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(8, 64, device="cuda")).sum().backward()
optimizer.step()
