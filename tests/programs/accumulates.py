"""A loop that accumulates gradients by hand over many micro-batches, as nanoGPT's does."""

import argparse

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--micro_batches", type=int, default=32)
parser.add_argument("--longer_at", type=int, default=-1)
parser.add_argument("--apart", action="store_true", help="the loss outside of the model")
parser.add_argument("--keeps", action="store_true", help="the losses of a step with their graphs, as a leak does")
parser.add_argument("--auxiliary", action="store_true", help="a loss of a part, which the model keeps")
given = parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(128, 2000, bias=False)
        self.auxiliary = None

    def forward(self, ids, targets):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        if given.auxiliary:
            self.auxiliary = hidden.square().mean()
        logits = self.head(hidden)
        if given.apart:
            return logits
        return logits, functional.cross_entropy(logits.view(-1, 2000), targets.view(-1))


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    total, kept = torch.zeros((), device="cuda"), []
    for number in range(given.micro_batches):
        length = 256 if number == given.longer_at else 128
        ids = torch.randint(2000, (8, length), device="cuda")
        if given.apart:
            loss = functional.cross_entropy(model(ids, ids).view(-1, 2000), ids.view(-1))
        else:
            loss = model(ids, ids)[1]
        if given.auxiliary:
            loss = loss + model.auxiliary
        (loss / given.micro_batches).backward(retain_graph=given.keeps)
        total += loss.detach()
        if given.keeps:
            kept.append(loss)
        del loss
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
