"""It evaluates, and makes no step of an optimizer."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
model.eval()
with torch.no_grad():
    print(model(torch.randn(4, 8, device=device)).mean().item())
