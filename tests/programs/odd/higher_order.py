"""It looks at attention, an operator of higher order, which nobody follows without a device."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(16, 16).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    heads = model(torch.randn(1, 2, 32, 16, device=device))
    seen = heads.detach()
    print(flex_attention(seen, seen, seen).shape)
    heads.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("attended")
