"""It reports the memory of the device as it goes."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def step(rows=4):
    loss = model(torch.randn(rows, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for number in range(3):
    step(1000)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert 0 < allocated <= torch.cuda.max_memory_allocated() <= torch.cuda.max_memory_reserved()
        assert allocated <= reserved < total - free < total == torch.cuda.get_device_properties(0).total_memory
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == allocated
        print(f"step {number}: {allocated} allocated, {reserved} reserved of {total}")
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        print(torch.cuda.memory_summary(abbreviated=True).splitlines()[1])
