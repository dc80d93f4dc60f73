"""Differentiable collectives where activations enter and leave a tensor-parallel region.

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
2019, section 3; its f and g are COPY and REDUCE. GATHER concatenates where REDUCE adds.
"""

from typing import Any

import torch
from torch.autograd import Function

from dryfit.core.sharding.shard_plan import Boundary
from dryfit.parallel.ranks.collectives import Ranks


def cross(boundary: Boundary, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
    """Apply a boundary's collective to an activation.

    Args:
        boundary: Which collective.
        tensor: The activation.
        ranks: This rank's end of the collectives.
        where: Place for messages; the same on each rank.
    """
    match boundary:
        case Boundary.COPY:
            return _Copy.apply(tensor, ranks, where) if tensor.requires_grad else tensor
        case Boundary.REDUCE:
            return _Reduce.apply(tensor, ranks, where)
        case Boundary.GATHER:
            return _Gather.apply(tensor, ranks, where)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
        ctx.ranks, ctx.where = ranks, where
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.ranks.all_reduce(gradient, f"gradients of {ctx.where}"), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
        return ranks.all_reduce(tensor, where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, where: str) -> torch.Tensor:
        ctx.ranks, ctx.size = ranks, tensor.shape[-1]
        return torch.cat(ranks.all_gather(tensor, where), -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.narrow(-1, ctx.ranks.rank * ctx.size, ctx.size).contiguous(), None, None
