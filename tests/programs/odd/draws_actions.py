"""Draws actions on the host by probabilities of the device, whose values a rehearsal does not know."""

import random

import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
policy = nn.Linear(4, 3).to(device)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for _ in range(3):
    odds = policy(torch.ones(2, 4, device=device)).softmax(-1)
    drawn = np.random.choice(3, p=odds[0].detach().cpu().numpy())
    listed = random.choices(range(3), weights=odds.double()[1].tolist())[0]
    assert np.allclose(odds.detach().cpu().numpy().sum(-1), 1)
    loss = -torch.log(odds[0, drawn] + odds[1, listed])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
