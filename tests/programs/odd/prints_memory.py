"""It reports the memory of the device as it goes."""

import torch
from one_layer import device, step

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
