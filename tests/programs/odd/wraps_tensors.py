"""A tensor class that quantises what is copied into it, with a table made on the device, as torchao's NF4 does."""

import torch
from torch import nn


class Quantised(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, dtype):
        self.codes = codes

    @classmethod
    def of(cls, tensor):
        cls.table = torch.tensor([-1.0, -0.5, 0.5, 1.0], device=tensor.device)
        nearest = (tensor.unsqueeze(-1) - cls.table).abs().argmin(-1)
        return cls(nearest.to(torch.uint8), tensor.dtype)

    def whole(self):
        return self.table[self.codes.int()]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(cls.of(args[1].to(args[0].device)).codes)
            return args[0]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].dtype)
        raise NotImplementedError(func)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.whole()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.whole().T, None


first = nn.Linear(64, 256).cuda()
weight = nn.Parameter(Quantised.of(torch.zeros(256, 256, device="cuda")), requires_grad=False)
with torch.no_grad():
    weight.copy_(torch.randn(256, 256))
optimizer = torch.optim.AdamW(first.parameters())
for _ in range(3):
    Product.apply(first(torch.randn(8, 64, device="cuda")), weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
