"""Shapes and types propagated through a model without weights; calls refused that would go wrong."""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import Cache

from dryfit.gpu.private_apis.torch_fakes import (
    FAKES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from dryfit.gpu.private_apis.torch_modes import MODES, tree_leaves, tree_map
from dryfit.gpu.private_apis.torch_modules import MODULES, hook_tables, parameters_of, pre_hooks
from dryfit.gpu.slots import slots
from dryfit.meta.file_formats import FileGuard
from dryfit.settings.errors import LoadError
from dryfit.settings.private_names import require

# Refuse calls that would silently go wrong: real inputs into a model without weights, and changed mapped files.


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


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """A tensor without its values.

    Attributes:
        shape: Size of each dimension.
        dtype: Type of the elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Shapes:
    """The outputs of a model and its modules for one input, as shapes and types.

    Attributes:
        output: The model's output; tensors in it are :class:`ShapeSpec`, a key-value cache is one pair per layer.
        modules: For each module that was called, by name, the output of each call in order. A module that sits at
            two paths has the name of the first.
    """

    output: Any
    modules: Mapping[str, tuple[Any, ...]]


def shapes(module: nn.Module, example_inputs: Mapping[str, Any] | Sequence[Any]) -> Shapes:
    """Propagate shapes and types through a model whose weights may be on meta.

    The computation runs on fake tensors, without memory, in a copy of the module tree: the module does not change.
    The answer is that of the real model in its present mode (``train`` or ``eval``); a forward that depends on the
    values of a tensor is refused.

    Args:
        module: The model; on meta, real or mixed.
        example_inputs: Keyword arguments by name, or positional arguments in order. Tensors in them may be real, on
            meta or a :class:`ShapeSpec`; all are taken as tensors on the CPU without values.

    Raises:
        RuntimeError: The model raised it; a note names the module.
        LoadError: The forward depends on the values of a tensor, or torch does not know the shape of an operation's
            result; the message names the module and the operation.
    """
    doing = f"propagating shapes through {type(module).__name__}"
    require(doing, FAKES, MODES, MODULES)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shadow = _shadow(module, mode, doing)
        outputs: dict[str, list[Any]] = {}
        inside: list[str] = []
        for name, part in shadow.named_modules():
            _watch(part, name, outputs, inside)
        args, kwargs = _stand_ins(example_inputs)
        try:
            output = shadow(*args, **kwargs)
        except _REFUSED as error:
            raise LoadError(
                doing,
                f"in {_place(shadow, inside)}, {_why(error)}",
                allowed="a forward whose shapes follow from the shapes and types of its inputs and weights",
                hint="propagate through the parts before and behind it, or run the model with its weights",
            ) from error
        except RuntimeError as error:
            error.add_note(f"{doing}, in {_place(shadow, inside)}")
            raise
        return Shapes(as_specs(output), MappingProxyType({name: tuple(calls) for name, calls in outputs.items()}))


def as_specs(value: Any) -> Any:
    """Replace every tensor in nested containers by its :class:`ShapeSpec`."""
    return tree_map(_leaf_spec, value)


_REFUSED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def _place(shadow: nn.Module, inside: list[str]) -> str:
    name = inside[-1] if inside else ""
    kind = type(shadow.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else f"({kind})"


def _why(error: BaseException) -> str:
    operation = getattr(error, "func", error.args[0] if error.args else "")
    match error:
        case DataDependentOutputException():
            return f"{operation} reads the values of a tensor, which has none here"
        case DynamicOutputShapeException():
            return f"the shape {operation} gives depends on the values of a tensor"
        case _:
            return f"torch does not know the shape that {operation} gives"


def _shadow(module: nn.Module, mode: FakeTensorMode, doing: str) -> nn.Module:
    """Copy the module tree with fake tensors in place of its own."""
    tensor_slots = slots(module)
    memo: dict[int, Any] = {}
    for slot in tensor_slots:
        tensor = slot.tensor
        if id(tensor) in memo:
            continue
        stand_in: Any = _stand_in(tensor)
        if isinstance(tensor, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=False)
        stand_in.__dict__.update({key: value for key, value in vars(tensor).items() if key not in vars(stand_in)})
        memo[id(tensor)] = stand_in
    try:
        shadow = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise LoadError(
            doing,
            f"the module cannot be copied: {error}",
            allowed="a module that copy.deepcopy can copy, apart from its parameters, buffers and plain tensors",
            hint="keep locks, files and results of computations out of the module's attributes",
        ) from error
    return allow_real_inputs(shadow)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory; call within a fake mode."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, layout=tensor.layout, device="cpu")
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _stand_ins(inputs: Mapping[str, Any] | Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, ShapeSpec):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        return _stand_in(leaf) if isinstance(leaf, torch.Tensor) else leaf

    if isinstance(inputs, Mapping):
        return (), {name: tree_map(replaced, value) for name, value in inputs.items()}
    return tuple(tree_map(replaced, value) for value in inputs), {}


def _watch(part: nn.Module, name: str, outputs: dict[str, list[Any]], inside: list[str]) -> None:
    def enter(_module: nn.Module, _args: Any) -> None:
        inside.append(name)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        inside.pop()
        outputs.setdefault(name, []).append(as_specs(output))

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave)


def _leaf_spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return ShapeSpec(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, Cache):
        # Layers of linear attention keep other states than keys and values.
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in leaf.layers]
        return tuple((_leaf_spec(keys), _leaf_spec(values)) for keys, values in pairs)
    return leaf
