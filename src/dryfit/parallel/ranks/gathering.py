"""The whole model's weights back from its ranks, for checkpoints that load anywhere."""

import torch
from torch import nn

from dryfit.core.errors import ShardError
from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.parallel.ranks.apply import SHARDED
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.ranks.collectives import Ranks


def gather_state(module: nn.Module, plan: ShardPlan, ranks: Ranks, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Put a cut module's state dict together, one tensor at a time; every rank calls it.

    Args:
        module: One rank's module.
        plan: How it is cut.
        ranks: This rank's end of the collectives.
        keep: Whether this rank wants it; one that does not helps only.

    Returns:
        The whole module's state dict, on the CPU, tied weights under each of their names as one tensor; empty where it
        is not kept.

    Raises:
        ShardError: The module is not cut as the plan says.
    """
    if vars(module).get(SHARDED) != (ranks.rank, plan.degree):
        raise ShardError(
            f"gathering a model from {ranks.degree} ranks",
            f"the module is not cut as rank {ranks.rank} of {plan.degree}",
            allowed="the module that dryfit.parallel.ranks.apply made, with its plan",
        )
    shards = shards_of(module, plan)
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, local in module.state_dict(keep_vars=True).items():
        if id(local) not in made:
            whole = gather(local.detach(), shards[name], ranks, name) if name in shards else local.detach()
            made[id(local)] = whole.to("cpu", copy=True) if keep else local
        if keep:
            state[name] = made[id(local)]
    return state


def gather(local: torch.Tensor, shard: ParameterShard, ranks: Ranks, what: str) -> torch.Tensor:
    """Put what the ranks hold of a parameter, or of something of its shape (a moment of it), together."""
    if shard.dim is None:
        return local
    held = ranks.all_gather(local, what)
    if len(shard.blocks) == 1:
        return torch.cat(held, shard.dim)
    sizes = [block // ranks.degree for block in shard.blocks]
    blocks = zip(*(one.split(sizes, shard.dim) for one in held), strict=True)
    return torch.cat([part for block in blocks for part in block], shard.dim)
