"""Weights and optimizer state of which each is several tensors: codes of 8 bits, and scales. As torchao keeps them."""

import torch
from torch import nn


class Coded(torch.Tensor):
    """A matrix as codes of 8 bits and a scale for each row."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _meta, _size, _stride):
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales)
        plain = [one.codes * one.scales if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def product(rows, codes):
    """Multiply codes, as torchao does: by its own kernel, unless the text of a tensor says that it is a fake."""
    assert "FakeTensor" not in rows.__repr__()
    return torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, rows, codes)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.full((4096, 4096), 3, dtype=torch.int8, device="cuda")
        self.weight = nn.Parameter(Coded(codes, torch.ones(4096, 1, device="cuda")), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4096, device="cuda"))

    def forward(self, rows):
        whole = product(rows.to(torch.int8), self.weight.codes.t())
        return rows + self.bias + whole * self.weight.scales.t()


class Slow(torch.optim.Optimizer):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if "average" not in self.state[parameter]:
                codes = torch.zeros(2048, 4096, dtype=torch.int8, device="cuda")
                self.state[parameter]["average"] = Coded(codes, torch.ones(2048, 1, device="cuda"))
            parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


model = Layer()
optimizer = Slow([model.bias], {"lr": 0.1})
for _ in range(10):
    model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
