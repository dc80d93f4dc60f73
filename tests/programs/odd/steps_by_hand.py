"""It changes its weights itself, without an optimizer, for a thousand epochs; each second pass adds up gradients."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tensors", action="store_true", help="weights are tensors without a module")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if args.tensors:
    first = torch.randn(64, 256, device=device, requires_grad=True)
    second = torch.randn(256, 64, device=device, requires_grad=True)
    weights = [first, second]
else:
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    weights = list(model.parameters())
for number in range(2000):
    data = torch.randn(512, 64, device=device)
    out = data @ first @ second if args.tensors else model(data)
    out.square().mean().backward()
    if number % 2:
        with torch.no_grad():
            for weight in weights:
                if args.tensors:
                    weight -= 0.1 * weight.grad
                else:
                    weight.data.add_(weight.grad, alpha=-0.1)
                weight.grad = None
        print("step", number)
