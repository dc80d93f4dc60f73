"""A loop whose evaluation keeps the logits of every batch on the device until its end."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4096)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
rows = TensorDataset(torch.randn(640, 64), torch.randint(0, 4096, (640,)))
for x, labels in DataLoader(rows, batch_size=64, shuffle=True):
    loss = nn.functional.cross_entropy(model(x.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
kept = []
with torch.no_grad():
    for x, _ in DataLoader(rows, batch_size=64):
        kept.append(model(x.to(device)))  # kept for all batches
print(torch.cat(kept).shape)
