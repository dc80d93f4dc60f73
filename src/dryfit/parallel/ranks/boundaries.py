"""Differentiable collectives where activations enter and leave a tensor-parallel region.

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
2019, section 3; its f and g are COPY and REDUCE. GATHER and SPLIT concatenate where these add.
"""

from typing import Any

import torch
from torch.autograd import Function

from dryfit.core.errors import ShardError
from dryfit.core.sharding.shard_plan import Boundary
from dryfit.parallel.ranks.collectives import Ranks


def cross(boundary: Boundary, tensor: torch.Tensor, ranks: Ranks, *, dim: int, where: str) -> torch.Tensor:
    """Apply a boundary's collective to an activation.

    Args:
        boundary: Which collective.
        tensor: The activation.
        ranks: This rank's end of the collectives.
        dim: The sharded dimension, counted from the end; only GATHER and SPLIT read it.
        where: Place for messages; the same on each rank.

    Raises:
        ShardError: The number of ranks does not divide the dimension to split.
    """
    match boundary:
        case Boundary.COPY:
            return _Copy.apply(tensor, ranks, where) if tensor.requires_grad else tensor
        case Boundary.REDUCE:
            return _Reduce.apply(tensor, ranks, where)
        case Boundary.GATHER:
            return _Gather.apply(tensor, ranks, dim, where)
        case Boundary.SPLIT:
            return _Split.apply(tensor, ranks, dim, where)


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
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, dim: int, where: str) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.where = ranks, dim, where
        return torch.cat(ranks.all_gather(tensor, where), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _share(gradient, ctx.ranks, ctx.dim, ctx.where), None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks, dim: int, where: str) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.where = ranks, dim, where
        return _share(tensor, ranks, dim, where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gathered = ctx.ranks.all_gather(gradient, f"gradients of {ctx.where}")
        return torch.cat(gathered, ctx.dim), None, None, None


def _share(tensor: torch.Tensor, ranks: Ranks, dim: int, where: str) -> torch.Tensor:
    size = tensor.shape[dim]
    if size % ranks.degree:
        raise ShardError(
            f"splitting {where} over {ranks.degree} ranks",
            f"dimension {dim} has {size} elements",
            allowed=f"a multiple of {ranks.degree}",
        )
    share = size // ranks.degree
    return tensor.narrow(dim, ranks.rank * share, share).contiguous()
