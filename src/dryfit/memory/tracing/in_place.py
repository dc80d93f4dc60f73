"""Operators of a backward pass that work in place on real tensors, though a trace sees a new tensor."""

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
"""Autograd's sum of gradients, and the operators by which its formulas fill fresh zeros."""


def reuses_first_argument(func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Tell whether the real operator would have reused its first argument.

    Args:
        func: One of :data:`CANDIDATES`, called while autograd works and gradients are off.
        target: Its first argument.
        args: All of them.
    """
    if func is not _ADD:
        return use_counts(target)[0] == sole_holder_counts()[0]
    other = args[1]
    same = isinstance(other, torch.Tensor) and other.shape == target.shape and other.dtype == target.dtype
    return same and not is_view(target) and use_counts(target) == sole_holder_counts()


@cache
def sole_holder_counts() -> tuple[int, int]:
    """Return the use counts of a gradient that only autograd holds, as a mode sees them.

    They depend on torch, so a small backward pass measures them; do not call it first within one.
    """
    seen: list[tuple[int, int]] = []
    gradient_sums(lambda summand: seen.append(use_counts(summand)))
    return seen[0]
