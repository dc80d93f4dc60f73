"""Its model is compiled."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    """A sum that reads so many tensors that inductor stores a part of it, or fuses it with what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))

    def forward(self, x):
        return sum(layer(x).relu() for layer in self.layers).square().mean()


model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model)
for _ in range(3):
    loss = compiled(torch.randn(args.rows, 8, device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("compiled")
