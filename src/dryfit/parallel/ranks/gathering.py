"""Put the ranks' slices of a tensor together, for checkpoints that load anywhere."""

import torch

from dryfit.core.sharding.shard_plan import ParameterShard
from dryfit.parallel.ranks.collectives import Ranks


def gather(local: torch.Tensor, shard: ParameterShard, ranks: Ranks, what: str) -> torch.Tensor:
    """Return a whole parameter, or a tensor of its shape such as an optimizer's moment; every rank calls it."""
    if shard.dim is None:
        return local
    held = ranks.all_gather(local, what)
    if len(shard.blocks) == 1:
        return torch.cat(held, shard.dim)
    sizes = [block // ranks.degree for block in shard.blocks]
    blocks = zip(*(one.split(sizes, shard.dim) for one in held), strict=True)
    return torch.cat([part for block in blocks for part in block], shard.dim)
