"""Its batches are made and moved by a thread."""

import queue
import threading

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
batches = queue.Queue(maxsize=2)


def produce():
    for _ in range(4):
        batches.put(torch.randn(16, 8).to(device))
    batches.put(None)


producer = threading.Thread(target=produce)
producer.start()
while (batch := batches.get()) is not None:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
producer.join()
print("trained")
