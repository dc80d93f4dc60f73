"""Refuse calls that would silently go wrong: real inputs into a model without weights, and changed mapped files."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dryfit.core.errors import LoadError
from dryfit.meta.files.file_guard import FileGuard
from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modes import tree_leaves
from dryfit.meta.private_apis.torch_modules import hook_tables, parameters_of, pre_hooks

_calls = threading.local()


def refuse_real_inputs(module: nn.Module) -> nn.Module:
    """Make a module without weights refuse real tensors, for which torch would return an empty result.

    A hook goes on every module that holds a parameter on meta, itself or below. Calls with meta or fake tensors
    pass, and so do all calls within them. The hooks let everything pass once no parameter is on meta any more.

    Returns:
        The same module.
    """
    allow_real_inputs(module)
    for part in module.modules():
        if any(parameter.is_meta for parameter in part.parameters()):
            guard = _Guard()
            part.register_forward_pre_hook(guard.enter, with_kwargs=True)
            part.register_forward_hook(guard.leave, always_call=True)
    return module


def allow_real_inputs(module: nn.Module) -> nn.Module:
    """Remove the hook of :func:`refuse_real_inputs`.

    Returns:
        The same module.
    """
    for part in module.modules():
        for hooks, flags in hook_tables(part):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Guard)]:
                for table in (hooks, *flags):
                    table.pop(key, None)
    return module


def watch_files(module: nn.Module, guard: FileGuard) -> None:
    """Check the files of mapped weights before each call of a module that holds some; replaces an earlier watch."""
    for part in module.modules():
        hooks = pre_hooks(part)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Watch)]:
            del hooks[key]
        if guard.files and any(map(is_mapped, parameters_of(part).values())):
            part.register_forward_pre_hook(_Watch(guard))


@dataclass(frozen=True, slots=True)
class _Watch:
    """Forward pre-hook; it ignores a module that was moved into memory of its own."""

    guard: FileGuard

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if any(map(is_mapped, parameters_of(module).values())):
            self.guard.check()


def is_mapped(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor lies in memory that is not torch's own."""
    return tensor is not None and not tensor.is_meta and not tensor.untyped_storage().resizable()


class _Guard:
    """Refuse the outermost call with real tensors; below a call with meta tensors everything passes.

    A model's own real tensors (position ids, rotary tables) reach its modules on the way, so only inputs from
    outside are checked. State is per thread; the instance has none, so that copies of a module are guarded too.
    """

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook."""
        stack: list[int] = _calls.__dict__.setdefault("stack", [])
        if id(module) in stack:  # left over by an interrupt
            stack.clear()
        if stack:
            return
        tensors = [leaf for leaf in tree_leaves((args, _plain(kwargs))) if isinstance(leaf, torch.Tensor)]
        real = [tensor for tensor in tensors if not tensor.is_meta and not isinstance(tensor, FakeTensor)]
        if not real:
            if tensors:
                stack.append(id(module))
            return
        parameters = list(module.parameters())
        lost = sum(parameter.is_meta for parameter in parameters)
        if lost:
            raise LoadError(
                f"calling {type(module).__name__} with a real tensor of shape {tuple(real[0].shape)}",
                f"the model has no weights yet: {lost} of {len(parameters)} parameters are on meta",
                allowed="tensors on meta, until the model has its weights",
                hint="call dryfit.meta.materialise first; for shapes alone, dryfit.meta.shapes",
            )

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, called after failures too."""
        stack: list[int] = _calls.__dict__.setdefault("stack", [])
        if stack and stack[-1] == id(module):
            stack.pop()


def _plain(kwargs: dict[str, Any]) -> list[Any]:
    """Return keyword arguments; mappings that torch does not look into (BatchEncoding) become dicts."""
    return [dict(value) if isinstance(value, Mapping) else value for value in kwargs.values()]
