"""Which operators of a backward pass work in place on real tensors, though a trace sees them make a new one."""

from functools import cache
from typing import Any

import torch

from dryfit.meta.private_apis.torch_recording import gradient_sums, use_counts
from dryfit.meta.private_apis.torch_tensors import is_view

_aten = torch.ops.aten
_ADD = _aten.add.Tensor

CANDIDATES = frozenset(
    {_ADD, _aten.scatter_add.default, _aten.index_put.default, _aten.index_add.default, _aten.masked_scatter.default}
)
"""Autograd's own sum of gradients, and what its formulas do with fresh zeros."""


def would_be(func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether the real operator would have reused its first argument.

    Args:
        func: One of :data:`CANDIDATES`, called while autograd works and gradients are off.
        target: Its first argument.
        args: All of them.
    """
    if func is not _ADD:
        return use_counts(target)[0] == nobody_else()[0]
    other = args[1]
    same = isinstance(other, torch.Tensor) and other.shape == target.shape and other.dtype == target.dtype
    return same and not is_view(target) and use_counts(target) == nobody_else()


@cache
def nobody_else() -> tuple[int, int]:
    """The counts of a gradient that only autograd holds, as a mode sees them.

    Measured with a small backward pass, for they depend on torch; not to be called for the first time in one.
    """
    seen: list[tuple[int, int]] = []
    gradient_sums(lambda summand: seen.append(use_counts(summand)))
    return seen[0]
