"""Initialisers cost nothing on tensors that have no values: a walk over a large model takes no time."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.virtual.import_hooks import rebind
from dryfit.virtual.known_values import MOST_NUMBERS, forget

_CONSTANT = frozenset({"constant_", "ones_", "zeros_"})
"""Those whose values are known afterwards."""
_ONLY_VALUES = (
    "constant_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
)
"""Those that change values alone. ``orthogonal_``, ``sparse_`` and ``dirac_`` allocate on the tensor's device."""


def install() -> None:
    """Let the initialisers of ``torch.nn.init`` leave large fakes as they are, sharded ones too."""
    for name in _ONLY_VALUES:
        original = getattr(nn.init, name)
        rebind(original, _for_values(original))


def _for_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not isinstance(own, FakeTensor):
            return original(tensor, *args, **kwargs)
        forget(own)
        if original.__name__ in _CONSTANT and own.numel() <= MOST_NUMBERS:
            original(tensor, *args, **kwargs)
        return tensor

    return initialise
