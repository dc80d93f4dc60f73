"""Trains a layer, and asks NVML and ``nvidia-smi`` about the device before and after."""

import subprocess

import torch
from pynvml import *  # noqa: F403
from torch import nn


def smi(*options):
    return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True).stdout


nvmlInit()  # noqa: F405
handle = nvmlDeviceGetHandleByIndex(0)  # noqa: F405
before = nvmlDeviceGetMemoryInfo(handle)  # noqa: F405
name, total, used = smi("-i", "0", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits").split(
    ", "
)
assert name == nvmlDeviceGetName(handle) == torch.cuda.get_device_name()  # noqa: F405
assert (int(total), int(used)) == (before.total // 2**20, before.used // 2**20) and before.used > 0
assert smi("-L").count("\n") == nvmlDeviceGetCount() == torch.cuda.device_count()  # noqa: F405
model = nn.Linear(8192, 8192).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(8, 8192, device="cuda")).sum().backward()
optimizer.step()
after = nvmlDeviceGetMemoryInfo(handle)  # noqa: F405
assert after.used - before.used == torch.cuda.memory_reserved() > 2 * 4 * 8192**2
for ask in (lambda: nvmlDeviceGetHandleByIndex(99), lambda: nvmlDeviceGetFanSpeed(handle)):  # noqa: F405
    try:
        ask()
    except NVMLError:  # noqa: F405
        continue
    raise AssertionError("NVML has answered")
nvmlShutdown()  # noqa: F405
