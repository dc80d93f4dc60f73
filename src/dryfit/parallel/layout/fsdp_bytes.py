"""Bytes of weights, gradients and optimizer state that a process of an FSDP model holds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


def share_of(size: int, rank: int, processes: int) -> tuple[int, int]:
    """Return begin and end of a process's rows, split as by ``torch.chunk``: the last processes may have none."""
    most = -(-size // processes)
    begin = min(rank * most, size)
    return begin, min(begin + most, size)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that one process holds between two steps.

    Attributes:
        weights_bytes: Shards of parameters, each padded to the longest shard.
        gradients_bytes: Shards of gradients, after a backward pass.
        state_bytes: The optimizer's state, without step counts.
    """

    weights_bytes: int
    gradients_bytes: int
    state_bytes: int


def held_bytes(parameters: Iterable[nn.Parameter], *, rank: int, processes: int, moments: int) -> HeldBytes:
    """Return the bytes that a process holds between two steps.

    torch pads weights and gradients to equal shards (``FSDPParam.padded_sharded_param_size``), optimizer state not.

    Args:
        parameters: All of the model's, tied ones once; they may be on the meta device.
        rank: Number of the process.
        processes: Number of processes.
        moments: Tensors of a parameter's shape and type that the optimizer keeps for it.
    """
    weights = gradients = state = 0
    for one in parameters:
        row_bytes = math.prod(one.shape[1:]) * one.itemsize
        padded = -(-one.shape[0] // processes) * row_bytes
        weights += padded
        if one.requires_grad:
            begin, end = share_of(one.shape[0], rank, processes)
            gradients += padded
            state += moments * (end - begin) * row_bytes
    return HeldBytes(weights, gradients, state)
