"""It imports a package that comes with a GPU alone."""

import torch
from flash_mla import flash_mla_with_kvcache

print(flash_mla_with_kvcache(*3 * [torch.zeros(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)]).shape)
