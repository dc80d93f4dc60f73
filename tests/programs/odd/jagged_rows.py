"""Trains attention over rows of several lengths: as ``nested`` tensors, or ``packed`` by hand for the same kernel."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

LENGTHS, HEADS, WIDTH = [200, 1000, 500, 300], 8, 64
device = torch.device("cuda")
way = sys.argv[1]
project = nn.ModuleList(nn.Linear(HEADS * WIDTH, HEADS * WIDTH, dtype=torch.bfloat16) for _ in range(4)).to(device)
optimizer = torch.optim.SGD(project.parameters(), lr=0.1)
rows = [torch.randn(length, HEADS * WIDTH, dtype=torch.bfloat16) for length in LENGTHS]
if way == "nested":
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)
else:
    batch = torch.cat(rows).to(device)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
for _ in range(3):
    query, key, value = (layer(batch).unflatten(-1, (HEADS, WIDTH)) for layer in project[:3])
    if way == "nested":
        seen = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        out = project[3](seen.transpose(1, 2).flatten(-2)).values()
        assert not batch.is_contiguous() or batch.size(0) == len(LENGTHS)
    else:
        longest = max(LENGTHS)
        seen = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, offsets, longest, longest, 0.0, False, False
        )[0]
        out = project[3](seen.flatten(-2))
    del query, key, value, seen
    loss = out.float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del out, loss
