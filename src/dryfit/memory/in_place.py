"""Which operators of a backward pass work in place on real tensors, though a trace sees them make a new one."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
        return _counts(target)[0] == nobody_else()[0]
    other = args[1]
    same = isinstance(other, torch.Tensor) and other.shape == target.shape and other.dtype == target.dtype
    return same and not target._is_view() and _counts(target) == nobody_else()


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor's storage and to the tensor."""
    storage: Any = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), tensor._use_count()  # pyright: ignore


@cache
def nobody_else() -> tuple[int, int]:
    """The counts of a gradient that only autograd holds, as a mode sees them.

    Measured with a small backward pass, for they depend on torch; not to be called for the first time in one.
    """
    seen: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and not torch.is_grad_enabled():
                seen.append(_counts(args[0]))
            return func(*args, **(kwargs or {}))

    with Look():
        leaf = torch.ones(2, 2, requires_grad=True)
        twice = leaf * 2
        (twice.relu().exp().sum() + twice.sin().exp().sum()).backward()
    return seen[0]
