"""It asks a condition on the device, an operator of higher order, which nobody follows without one."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(16, 16).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    heads = model(torch.randn(1, 2, 32, 16, device=device))
    seen = heads.detach()
    print(torch.ops.higher_order.cond(seen.sum() > 0, torch.sin, torch.cos, (seen,)).shape)
    heads.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("attended")
