"""It imports a package that comes with a GPU alone."""

import torch
from flash_attn import flash_attn_func

print(flash_attn_func(*3 * [torch.zeros(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)]).shape)
