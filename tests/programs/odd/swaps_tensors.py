"""Gives a parameter the place of another one, as torchtune does with quantised weights."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).cuda()
torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight.detach().to(torch.bfloat16).float()))
other = nn.Linear(256, 256, bias=False)
torch.utils.swap_tensors(other.weight, nn.Parameter(torch.zeros(256, 256)))
model.append(other.cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
