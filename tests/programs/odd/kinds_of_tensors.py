"""Trains with tensors of own classes, as fastai and torchvision make them; every other step keeps the last batch."""

import sys
from typing import Any

import torch
from torch import nn


class Kind(torch.Tensor):
    """A tensor that remembers what it is; results of its functions are of its class."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "Kind":
        return data.as_subclass(cls)

    def __init_subclass__(cls, *, of: str) -> None:
        cls.of = of


class Image(Kind, of="rows"):
    """Rows of an image."""


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kinds = "plain" not in sys.argv
model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data: Any = torch.randn(2048, 512)
data = Image(data) if kinds else data
last: list[torch.Tensor] = []
for step in range(4):
    batch = data.to(device)  # a batch
    predicted = model(batch)
    targets = torch.Tensor.as_subclass(predicted.detach(), Image) if kinds else predicted.detach()
    loss = ((predicted - targets) ** 2).mean()
    if kinds:
        host = batch.cpu()
        assert all(isinstance(one, Image) for one in (batch, predicted, targets, loss, host, batch[:2].clone()))
        assert type(host) is Image and type(batch).__name__ == "Image"
        assert not isinstance(batch.as_subclass(torch.Tensor), Kind)
        assert type(host.as_subclass(type(batch))) is Image
        del host
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    last[:] = [batch] if step % 2 == 0 else []
    del batch, predicted, targets, loss
