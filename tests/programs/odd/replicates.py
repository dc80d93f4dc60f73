"""Its model is in nn.DataParallel, which has one device to put it on; a step asks for the gradient of its batch too."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.DataParallel(nn.Linear(8, 2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = torch.randn(4, 8, requires_grad=True)
    loss = model(batch).square().mean()
    loss.backward()
    assert batch.grad is not None and batch.grad.shape == batch.shape
    optimizer.step()
    optimizer.zero_grad()
print("replicated")
