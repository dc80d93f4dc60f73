"""Propagate shapes and types through a model without weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import Cache

from dryfit.core.errors import LoadError
from dryfit.core.private_names import require
from dryfit.meta.construction.walk import slots
from dryfit.meta.inputs import allow_real_inputs
from dryfit.meta.private_apis.torch_fakes import (
    FAKES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from dryfit.meta.private_apis.torch_modes import MODES, tree_map
from dryfit.meta.private_apis.torch_modules import MODULES


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
