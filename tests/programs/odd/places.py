"""What a backward pass makes stands where the operator stood that it undoes, whatever ran between."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
embed, head = nn.Embedding(20_000, 64).to(device), nn.Linear(64, 8).to(device)
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    ids = torch.randint(0, 20_000, (4, 128), device=device)
    hidden = embed(ids)  # its gradient is the peak
    mask = (ids == 0).logical_not()  # has no gradient
    logits = head(hidden).masked_fill(~mask[..., None], 0)
    loss = nn.functional.cross_entropy(logits.view(-1, 8), ids.view(-1) % 8)
    logged = loss.detach()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
