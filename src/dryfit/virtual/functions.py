"""Functions of torch that go round its dispatcher, and the places where a tensor must stay the same object.

Patched for the life of the process: a :class:`TorchFunctionMode` for constructors that switch dispatch modes off and
for what reads a tensor's memory, ``nn.Parameter`` and what ``nn.Module.to`` does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modules import buffers_of, parameters_of
from dryfit.meta.private_apis.torch_virtual import replace_apply
from dryfit.virtual.dispatch import VirtualDispatch, zeros
from dryfit.virtual.known_values import remember, value_of

_MAKES_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.sparse_coo_tensor})
_READS_MEMORY = frozenset({torch.Tensor.numpy, torch.Tensor.__array__})


class VirtualFunctions(TorchFunctionMode):
    """Makes tensors from data on the CPU and moves them; reads fakes as known values or zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _MAKES_FROM_DATA:
            device = kwargs.get("device")
            if device is None and args and isinstance(args[0], FakeTensor):
                return func(*args, **kwargs)
            if device is not None and _is_cuda(device) and not isinstance(args[0], FakeTensor):
                made = func(*args, **{**kwargs, "device": "cpu"})
                moved = made.detach().to(device)
                return moved.requires_grad_(made.requires_grad) if made.requires_grad else moved
        elif func is torch.Tensor.new_tensor and isinstance(args[0], FakeTensor):
            device = kwargs.pop("device", args[0].device)
            made = torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs})
            return made.to(device)
        elif func in _READS_MEMORY and isinstance(args[0], FakeTensor):
            return func(_real(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor in a fake's place; as torch does, only of one on the CPU that needs no gradient.

    Raises:
        TypeError: It is on a CUDA device.
        RuntimeError: It needs a gradient.
    """
    if tensor.device.type == "cuda":
        raise TypeError(
            f"can't convert {tensor.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    value = value_of(tensor)
    return value if value is not None else zeros(tensor.shape, tensor.dtype)


def install(dispatch: VirtualDispatch) -> None:
    """Make every parameter a fake from its beginning, and let it stay the same object wherever it is moved."""
    make = nn.Parameter.__new__

    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        if type(data) in (torch.Tensor, nn.Parameter) and data.device.type == "cpu":
            data = dispatch.faked(data)
        return make(cls, data, requires_grad)

    nn.Parameter.__new__ = new_parameter  # pyright: ignore[reportAttributeAccessIssue]
    replace_apply(_apply)
    FakeTensor.tolist = _to_list


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Move a module as ``nn.Module.to`` does; torch would swap fakes, which fails where anything refers to one."""
    if recurse:
        for module in self.children():
            _apply(module, fn)
    for key, parameter in parameters_of(self).items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = fn(parameter)
        if moved is not parameter and not become(parameter, moved):
            parameters_of(self)[key] = nn.Parameter(moved, parameter.requires_grad)
        if parameter.grad is not None:
            with torch.no_grad():
                parameter.grad = fn(parameter.grad)
    for key, buffer in buffers_of(self).items():
        if buffer is not None:
            buffers_of(self)[key] = fn(buffer)
    return self


def _to_list(self: torch.Tensor) -> Any:
    return _real(self.detach().cpu()).tolist()


def become(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Let a fake have the data, device and type of another one; whether it could."""
    if not isinstance(tensor, FakeTensor) or type(other) is not FakeTensor:
        return False
    tensor.data = other
    tensor.fake_device = other.fake_device
    value = value_of(other)
    if value is not None:
        remember(tensor, value)
    return True
