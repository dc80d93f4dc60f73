"""Views of one fake and writes to it, without torch's way around them.

torch's fake mode remembers what an operator gives by its arguments. A loop over the elements of a tensor has new ones
each time (``labels[n] = 3``, ``for label in labels``): it goes the longest way, twice for a view, some milliseconds
each. What these operators give is known without it.
"""

from typing import Any

import torch

from dryfit.meta.private_apis.torch_fakes import FakeTensor, FakeTensorMode, in_kernel_of

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.unbind.int,
        _aten.split.Tensor,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
    }
)
_FILLS = frozenset({_aten.fill_.Scalar, _aten.zero_.default})


def given(func: Any, args: Any, kwargs: Any, fakes: FakeTensorMode) -> Any:
    """Return what such an operator gives; None: it is another one.

    Args:
        fakes: The mode that made all fakes.
    """
    if kwargs or not args or not isinstance(first := args[0], FakeTensor):
        return None
    if func in _VIEWS and first.layout is torch.strided:
        device = first.device
        with in_kernel_of(fakes):
            seen = func(*args)
        if isinstance(seen, torch.Tensor):
            return FakeTensor(fakes, seen, device)
        return [FakeTensor(fakes, one, device) for one in seen]
    if func in _FILLS or (func is _aten.copy_.default and _is_element(args)):
        return first
    return None


def _is_element(args: Any) -> bool:
    """Whether a number is copied into a number."""
    return len(args) == 2 and not args[0].ndim and isinstance(args[1], torch.Tensor) and not args[1].ndim
