"""Subclasses of tensors that libraries make with ``torch.Tensor._make_subclass``, of fakes.

torch cannot make one of a fake: that has a class already. bitsandbytes keeps its quantised weights in such classes
(``Params4bit``, ``Int8Params``), by whose names other libraries know them. Here a fake becomes an instance of a class
that is both: theirs first, so that its methods and attributes act, and a fake for torch.

To be removed when ``_make_subclass`` takes fakes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_tensors import replace_make_subclass

Make = Callable[[torch.Size, torch.dtype, torch.device, bool], torch.Tensor]
"""Makes a fake of a shape, type and device; whether it requires a gradient."""

_DATA: Any = torch.Tensor.data


def install(make: Make) -> None:
    """Let libraries make their own classes of fakes.

    Args:
        make: Makes a fake.
    """

    def made(cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        is_fake = isinstance(data, FakeTensor)
        if cls is FakeTensor or not (is_fake or (_is_weight(cls) and not data.is_meta)):
            return original(cls, data, require_grad, **options)
        fake: Any = data.detach() if is_fake else make(data.shape, data.dtype, data.device, False)
        fake.__class__ = _both(cls)
        return fake.requires_grad_(require_grad)

    def like(cls: Any, *args: Any, **state: Any) -> Any:
        is_data = args and (
            isinstance(args[0], FakeTensor) or (type(args[0]) is torch.Tensor and not state.get("fake_mode"))
        )
        if cls is not FakeTensor or not is_data:
            return new(cls, *args, **state)
        # ``type(parameter)(data, **vars(parameter))``, as accelerate gives one other data, small ones with values
        return nn.Parameter(args[0], state.get("requires_grad", False))

    new = FakeTensor.__new__
    FakeTensor.__new__ = like  # pyright: ignore[reportAttributeAccessIssue]
    original = replace_make_subclass(made)
    FakeTensor.data = property(_DATA.__get__, _setting_data(make))  # pyright: ignore[reportAttributeAccessIssue]


def _setting_data(make: Make) -> Callable[[Any, torch.Tensor], None]:
    """Return what sets ``tensor.data`` of a fake: it stays one, and is where its new data are."""

    def set_data(tensor: Any, data: torch.Tensor) -> None:
        if not isinstance(data, FakeTensor):
            data = make(data.shape, data.dtype, data.device, False)
        _DATA.__set__(tensor, data)
        tensor.fake_device = data.device

    return set_data


@cache
def _is_weight(cls: Any) -> bool:
    """Whether a class is one of weights, all of which are fakes; one without a shape yet is none."""
    return issubclass(cls, nn.Parameter) and cls is not nn.Parameter and not issubclass(cls, UninitializedTensorMixin)


@cache
def _both(cls: Any) -> Any:
    """Return the class of fakes that are instances of a library's class of tensors as well."""
    if issubclass(cls, FakeTensor):
        return cls

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls, FakeTensor), names)
