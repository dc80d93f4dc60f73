"""Outputs of a model that are made instead of computed: which can be, and by what of its arguments they are decided."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modes import tree_flatten

_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, strides, type and device of a tensor, and whether it has a gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    learns: bool


def shapes_of(given: Any) -> tuple[Any, ...] | None:
    """Return what of a call's arguments decides its memory; None where it takes more than tensors and constants."""
    leaves, form = tree_flatten(given, is_leaf=is_cache)
    if not all(
        isinstance(leaf, _SIMPLE) or type(leaf) in (torch.Tensor, nn.Parameter) or _is_on_device(leaf)
        for leaf in leaves
    ):
        return None
    return (*map(form_of, leaves), form)


def is_cache(one: Any) -> bool:
    """Whether this is a cache of keys and values, which a call changes, though torch can take it apart."""
    return hasattr(one, "get_seq_length")


def _is_on_device(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor on the virtual GPU: what lies on the host may have values that count."""
    return isinstance(leaf, FakeTensor) and leaf.device.type == "cuda" and leaf.layout is torch.strided


def can_be_made(leaves: Sequence[Any]) -> bool:
    """Whether an output of these leaves can be made: they are constants, and tensors on the device."""
    return all(isinstance(leaf, _SIMPLE) or _is_on_device(leaf) for leaf in leaves)


def form_of(leaf: Any) -> Any:
    """Return what a tensor is made anew from; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return Form(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad)


def anew(leaf: Any) -> Any:
    """Return a tensor of a form; anything else as it is."""
    if not isinstance(leaf, Form):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=leaf.device)
