"""Private names of torch about tensors: identity of their memory, and other tensors on the same memory."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # telling storages apart, also those on meta, whose address is 0; until: a public identity of storages that
    # holds for the storage and not for a Python object
    "torch.UntypedStorage._cdata",
    # making a parameter of a subclass on memory that is there, without its __new__, and one of a fake; until:
    # torch.Tensor.as_subclass makes leaves and takes requires_grad
    "torch.Tensor._make_subclass",
    # knowing whether .data of a tensor can be set to another one before it is tried; until: torch says so by a
    # public name; nn.Module.to asks the same
    "torch._has_compatible_shallow_copy_type",
    # knowing whether memory is shared with a tensor that autograd tracks; until: torch makes it public
    "torch.Tensor._is_view",
)


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the storage of a tensor among all live ones."""
    return tensor.untyped_storage()._cdata


def key_of(storage: torch.UntypedStorage) -> int:
    """Identify a storage among all live ones."""
    return storage._cdata


def on_same_memory(cls: type[Any], data: torch.Tensor, requires_grad: bool = False) -> Any:
    """Return a detached tensor of a class on another's memory; neither ``__new__`` nor ``__init__`` is called."""
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def replace_make_subclass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let another function make tensors of a class on others' memory; return the one that did."""
    original = torch.Tensor._make_subclass
    torch.Tensor._make_subclass = staticmethod(function)  # pyright: ignore[reportAttributeAccessIssue]
    return original


def takes_data(old: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a tensor can be given the data of another one and stay the same object."""
    return torch._has_compatible_shallow_copy_type(old, data)  # pyright: ignore[reportPrivateImportUsage]


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return tensor._is_view()


def _misbehaves() -> str:
    empty, real = torch.empty(4, device="meta"), torch.ones(4)
    keys = [storage_key(one) for one in (empty, empty[1:], torch.empty(4, device="meta"))]
    if keys[0] != keys[1] or keys[0] == keys[2] or keys[0] != key_of(empty.untyped_storage()):
        return "torch.UntypedStorage._cdata does not tell storages apart"
    made = on_same_memory(nn.Parameter, real, True)
    if type(made) is not nn.Parameter or not made.requires_grad or made.data_ptr() != real.data_ptr():
        return "torch.Tensor._make_subclass makes no parameter on the same memory"
    if not takes_data(real, torch.zeros(2)) or takes_data(real, empty):
        return "torch._has_compatible_shallow_copy_type does not say which data a tensor can be given"
    if is_view(real) or not is_view(real[1:]):
        return "torch.Tensor._is_view does not tell views from other tensors"
    return ""


TENSORS: Final = PrivateNames("torch", NAMES, _misbehaves)
