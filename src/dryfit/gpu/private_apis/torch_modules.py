"""Private names of ``torch.nn.Module``: its tables of parameters, buffers, submodules and hooks."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # replacing a parameter in one place, past __setattr__; until: a public way to read and replace one entry,
    # None and ties included
    "torch.nn.Module._parameters",
    # replacing a buffer in one place, past __setattr__; until: a public way to read and replace one entry, None
    # and ties included
    "torch.nn.Module._buffers",
    # walking a module that sits at two paths, with both names; until: a public way to read and replace one
    # entry, None and ties included
    "torch.nn.Module._modules",
    # knowing which buffers a checkpoint does not hold; until: named_buffers says which are persistent
    "torch.nn.Module._non_persistent_buffers_set",
    # taking our own hooks off a copied module; until: torch takes hooks off by the function that was registered
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._forward_pre_hooks_with_kwargs",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_hooks_with_kwargs",
    "torch.nn.Module._forward_hooks_always_called",
    # reading keys of checkpoints that a compiled model has written: its wrapper's attribute is a part of each;
    # never: files with it stay
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
)

COMPILED: Final = "_orig_mod"
"""What ``torch.compile`` adds to the keys of a state dict."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own table of parameters; entries written into it become parameters of the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own table of its own buffers."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own table of its submodules."""
    return module._modules


def replace_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Give a module another table of submodules."""
    module._modules = children


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of its own buffers that are in no state dict."""
    return module._non_persistent_buffers_set


def pre_hooks(module: nn.Module) -> dict[int, Any]:
    """The module's own table of hooks that are called before its forward."""
    return module._forward_pre_hooks


def hook_tables(module: nn.Module) -> Iterator[tuple[dict[int, Any], tuple[dict[int, bool], ...]]]:
    """Tables of hooks before and after a module's forward, each with the tables that say how they are called."""
    yield module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)
    yield module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)


def _misbehaves() -> str:
    part, other = nn.Module(), nn.Parameter(torch.zeros(1), requires_grad=False)
    part.register_parameter("weight", None)
    part.register_buffer("kept", torch.zeros(1))
    part.register_buffer("dropped", torch.zeros(1), persistent=False)
    part.add_module("inner", nn.Identity())
    parameters_of(part)["weight"] = other
    if part.get_parameter("weight") is not other or list(part.state_dict()) != ["weight", "kept"]:
        return "what is written into torch.nn.Module._parameters is not a parameter of the module"
    if list(buffers_of(part)) != ["kept", "dropped"] or unsaved_buffers(part) != {"dropped"}:
        return "torch.nn.Module._non_persistent_buffers_set does not name the buffers that are in no state dict"
    replace_children(part, {**children_of(part), "second": nn.Identity()})
    if [name for name, _ in part.named_children()] != ["inner", "second"]:
        return "what stands in torch.nn.Module._modules is not what a module's submodules are"
    part.register_forward_pre_hook(print, with_kwargs=True)
    part.register_forward_hook(print, with_kwargs=True, always_call=True)
    for hooks, flags in hook_tables(part):
        if list(hooks.values()) != [print] or any(list(table) != list(hooks) for table in flags):
            return "torch.nn.Module._forward_hooks and its like do not hold the hooks of a module by one key"
    return ""


MODULES: Final = PrivateNames("torch", NAMES[:-1], _misbehaves)
