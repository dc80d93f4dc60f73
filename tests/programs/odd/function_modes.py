"""Trains a layer of FlexAttention whose mask is made ``eager`` or ``compiled``, in a function mode of its own."""

import sys

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode


class Counted(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Counted.calls += 1
        return func(*args, **(kwargs or {}))


@torch.compile
def doubled(x):
    with Counted():
        return x * 2


attend = torch.compile(flex_attention)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cuda", _compile=sys.argv[1] == "compiled")
layer = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(layer.parameters())
for _step in range(3):
    with Counted():
        x = doubled(layer(torch.randn(2, 4, 256, 64, device="cuda")))
        loss = attend(x, x, x, block_mask=mask).mean()
    calls = Counted.calls
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
assert Counted.calls == calls > 0
