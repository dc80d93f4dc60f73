"""What a process holds of a model that is divided among several: weights, gradients and optimizer state."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


def share_of(size: int, rank: int, processes: int) -> tuple[int, int]:
    """Begin and end of what a process has of so many rows, cut as by ``torch.chunk``: the last ones may have none."""
    most = -(-size // processes)
    begin = min(rank * most, size)
    return begin, min(begin + most, size)


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """A parameter that is divided along its first dimension.

    Attributes:
        shape: Of all of it; one dimension at least.
        itemsize: Bytes of a number.
        trained: Whether it has a gradient.
    """

    shape: tuple[int, ...]
    itemsize: int
    trained: bool


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What one process holds between two steps.

    Attributes:
        weights_bytes: Parts of parameters, each as long as the longest part is.
        gradients_bytes: Of those that are trained, after a backward pass.
        state_bytes: The optimizer's, without its counts of steps.
    """

    weights_bytes: int
    gradients_bytes: int
    state_bytes: int


def held_bytes(parameters: Iterable[ParameterSize], *, rank: int, processes: int, moments: int) -> HeldBytes:
    """What a process holds of a model's parameters. Tied ones must be named once.

    torch pads weights and gradients to equal parts (``FSDPParam.padded_sharded_param_size``), the state it does not.

    Args:
        parameters: All of the model's.
        rank: Of the process.
        processes: How many there are.
        moments: Tensors of the parameter's shape and type that the optimizer keeps for each.
    """
    weights = gradients = state = 0
    for one in parameters:
        row_bytes = math.prod(one.shape[1:]) * one.itemsize
        padded = -(-one.shape[0] // processes) * row_bytes
        weights += padded
        if one.trained:
            begin, end = share_of(one.shape[0], rank, processes)
            gradients += padded
            state += moments * (end - begin) * row_bytes
    return HeldBytes(weights, gradients, state)
