"""Real tensors that become fakes when they are given memory: lazy parameters, and what is set as ``tensor.data``.

They stay the same objects, as for torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import (
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,  # pyright: ignore[reportAttributeAccessIssue]
)

from dryfit.meta.private_apis.torch_fakes import FakeTensor, forget


def install() -> None:
    """Let parameters and buffers without a shape be on the host until they have one, and then where they belong."""
    for cls in (UninitializedParameter, UninitializedBuffer):
        cls.__new__ = _made_on_the_host(cls, cls.__new__)  # pyright: ignore[reportAttributeAccessIssue]
    UninitializedTensorMixin.materialize = _materialize  # pyright: ignore[reportAttributeAccessIssue]


def moved(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Note where a tensor without a shape is moved to; whether it is one."""
    lazy: Any = tensor
    if not isinstance(tensor, UninitializedTensorMixin):
        return False
    probe = fn(torch.empty(0, dtype=lazy.dtype, device=lazy.dryfit_device))
    lazy.data = torch.empty(0, dtype=probe.dtype, device="cpu")
    lazy.dryfit_device = probe.device
    return True


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Let a real tensor be a fake on the memory of another one.

    Raises:
        RuntimeError: Something refers to it weakly, or autograd holds it.
    """
    _become(tensor, data, tensor.requires_grad)


def _made_on_the_host(owner: type, make: Any) -> Any:
    def new(
        cls: Any,
        requires_grad: bool = issubclass(owner, nn.Parameter),
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> Any:
        made = make(cls, requires_grad, torch.device("cpu"), dtype, **options)
        made.dryfit_device = torch.get_default_device() if device is None else torch.device(device)
        return made

    return new


def _materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """Give a tensor its shape (``UninitializedTensorMixin.materialize``)."""
    made = torch.empty(shape, device=device or self.dryfit_device, dtype=dtype or self.dtype)
    requires_grad = self.requires_grad
    becomes = self.cls_to_become
    if issubclass(becomes, nn.Parameter):
        made = nn.Parameter(made, requires_grad)
    self.__class__ = becomes
    _become(self, made, requires_grad)


def _become(tensor: torch.Tensor, other: torch.Tensor, requires_grad: bool) -> None:
    """Let a tensor be on the memory of another one, and of its kind."""
    made = other.detach().requires_grad_(requires_grad)  # of its own: nothing refers to it yet
    for source in (other, tensor):
        vars(made).update({name: value for name, value in vars(source).items() if not hasattr(made, name)})
    if isinstance(made, FakeTensor):
        forget(made)
    torch.utils.swap_tensors(tensor, made)
