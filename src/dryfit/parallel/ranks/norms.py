"""The gradient norm of a tensor-parallel model, for clipping."""

import torch
from torch import nn

from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.ranks.collectives import Ranks


def gradient_norm(module: nn.Module, plan: ShardPlan, ranks: Ranks) -> torch.Tensor:
    """Return the 2-norm of the whole model's gradients, the same on each rank; every rank calls it.

    Slices of all ranks count; parameters that every rank holds whole count once, those without a gradient not at all.
    """
    shards = shards_of(module, plan)
    device = next(module.parameters()).device
    of_slices, of_whole = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            wide = torch.promote_types(parameter.grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(parameter.grad, dtype=wide)
            total = of_whole if shards[name].dim is None else of_slices
            total += norm.double().square()
    return (ranks.all_reduce(of_slices, "the gradients' norm") + of_whole).sqrt()
