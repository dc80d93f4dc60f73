"""Trains with an operator of its own for products, whose code makes copies, or by ``torch``; ``compiled`` or not.

The fake of the own operator gives outputs alone. Others ask for a value, or write to an
address: their fakes say what they give.
"""

import ctypes
import sys

import torch
from torch import Tensor, nn

way, mode = sys.argv[1:]
ROWS, WIDTH, WORDS = 2048, 512, 16384


@torch.library.custom_op("program::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch.library.custom_op("program::gradients", mutates_args=())
def gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    copies = [g.clone() for _ in range(int(way))]
    return copies[0] @ w, copies[1].t() @ x


@gradients.register_fake
def _(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


@torch.library.custom_op("program::asks", mutates_args=())
def asks(x: Tensor) -> Tensor:
    return x.new_zeros(int(x.sum().item()))


@asks.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(ROWS)


@torch.library.custom_op("program::fills", mutates_args=())
def fills(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ctypes.memset(out.data_ptr(), 0, out.nbytes)
    return out


fills.register_fake(torch.empty_like)


def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.program.gradients(g.contiguous(), *ctx.saved_tensors)


product.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
multiply = (lambda x, w: x @ w.t()) if way == "torch" else product
weight = nn.Parameter(torch.randn(WORDS, WIDTH, device="cuda"))
optimizer = torch.optim.SGD([weight], 0.1)


def loss_of(x: Tensor) -> Tensor:
    return multiply(x, weight).square().mean()


if mode == "compiled":
    loss_of = torch.compile(loss_of)
for _ in range(3):
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()
assert len(asks(x.detach())) == len(fills(x.detach())) == ROWS
