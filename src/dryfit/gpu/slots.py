"""Slots of a module (parameters, buffers, plain attributes that hold tensors): list, read and replace them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from dryfit.gpu.private_apis.torch_modes import is_traceable_wrapper_subclass
from dryfit.gpu.private_apis.torch_modules import buffers_of, children_of, parameters_of, unsaved_buffers
from dryfit.settings.older_python import StrEnum

# Deep enough for anything a person writes; a bound only so that a generated structure cannot exhaust the stack.
_MOST_NESTED = 16
_CONFIGS = "transformers.configuration_utils"
# Attributes of every module: hooks, and the tables of parameters, buffers and submodules.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class SlotKind(StrEnum):
    """The kind of a slot."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place in a module that holds a tensor. A tie is two slots with one tensor.

    Attributes:
        name: Dotted, as in a state dict: ``encoder.layer.0.weight``. Plain attributes are named like
            ``encoder.scale``, and within containers like ``encoder.tables[0]`` or ``encoder.cache['x']``.
        kind: Parameter, buffer or plain attribute.
        owner: The module that holds it.
        path: Name, then indices, keys and fields from the owner to the tensor.
        tensor: The tensor in the slot when it was listed.
        persistent: Whether a state dict has it: parameters always, buffers as registered, attributes never.
        aliases: Further names of the same slot; a state dict has them too when one module sits at two paths.
    """

    name: str
    kind: SlotKind
    owner: nn.Module
    path: tuple[Any, ...]
    tensor: torch.Tensor
    persistent: bool
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the slot, the first one first."""
        return (self.name, *self.aliases)


def slots(module: nn.Module) -> list[Slot]:
    """Find every parameter, buffer and plain tensor attribute of a module and its submodules.

    Plain attributes are also looked for in lists, tuples, dicts and dataclass instances, but not in configs, nor in
    modules that are not registered as submodules: those are not part of the module. Slots that hold None are left out.

    Returns:
        The slots, module by module in the order of a state dict; a module that sits at two paths comes once.
    """
    modules: dict[int, tuple[nn.Module, list[str]]] = {}
    _collect(module, "", modules, set())
    tensor_slots: list[Slot] = []
    for owner, prefixes in modules.values():
        first, rest = prefixes[0], prefixes[1:]
        hidden: set[str] = unsaved_buffers(owner)
        for kind, table in ((SlotKind.PARAMETER, parameters_of(owner)), (SlotKind.BUFFER, buffers_of(owner))):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                persistent = kind is SlotKind.PARAMETER or key not in hidden
                aliases = tuple([prefix + key for prefix in rest]) if rest else ()
                tensor_slots.append(Slot(first + key, kind, owner, (key,), tensor, persistent, aliases))
        for label, path, tensor in _attributes(owner):
            aliases = tuple([prefix + label for prefix in rest])
            tensor_slots.append(Slot(first + label, SlotKind.ATTRIBUTE, owner, path, tensor, False, aliases))
    return tensor_slots


def put(slot: Slot, tensor: torch.Tensor) -> None:
    """Replace the tensor in one slot; the slot's kind and persistence stay.

    Tuples and frozen dataclass instances on the way are replaced by copies that differ only there.

    Args:
        slot: The slot.
        tensor: Its new tensor; an ``nn.Parameter`` for a parameter.

    Raises:
        TypeError: A plain tensor for a parameter.
    """
    key = slot.path[0]
    match slot.kind:
        case SlotKind.PARAMETER:
            if not isinstance(tensor, nn.Parameter):
                raise TypeError(f"{slot.name} is a parameter; it cannot hold a {type(tensor).__name__}")
            parameters_of(slot.owner)[key] = tensor
        case SlotKind.BUFFER:
            buffers_of(slot.owner)[key] = tensor
        case SlotKind.ATTRIBUTE:
            # Past the module's own __setattr__, which would register a parameter it is given.
            table = vars(slot.owner)
            table[key] = _replaced(table[key], slot.path[1:], tensor) if len(slot.path) > 1 else tensor


def put_all(module: nn.Module, make: Callable[[Slot], torch.Tensor | None]) -> list[tuple[Slot, torch.Tensor]]:
    """Replace tensors of a module by new ones; ties stay ties, and parameters parameters.

    Args:
        module: Changed in place.
        make: A new tensor for that of a slot, called once for tied ones; a plain one for a parameter too. None: it
            stays.

    Returns:
        Each changed slot as it was, with its new tensor.
    """
    tensor_slots = slots(module)  # holds the old tensors, so that no new one has an old one's id
    made: dict[int, torch.Tensor | None] = {}
    changed: list[tuple[Slot, torch.Tensor]] = []
    for slot in tensor_slots:
        old = slot.tensor
        if id(old) not in made:
            new: Any = make(slot)
            if isinstance(old, nn.Parameter) and new is not None and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(old)] = new
        new_tensor = made[id(old)]
        if new_tensor is not None:
            put(slot, new_tensor)
            changed.append((slot, new_tensor))
    return changed


def like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return an empty tensor on a device, of a tensor's shape, strides and number format."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def replaced(module: nn.Module, make: Callable[[Slot], torch.Tensor | None]) -> Iterator[None]:
    """Replace tensors of a module inside the block, as :func:`put_all` does, and put them back."""
    changed = put_all(module, make)
    try:
        yield
    finally:
        for slot, _ in changed:
            put(slot, slot.tensor)


def current(slot: Slot) -> torch.Tensor:
    """Return the tensor that a slot holds now."""
    match slot.kind:
        case SlotKind.PARAMETER:
            value: Any = parameters_of(slot.owner)[slot.path[0]]
        case SlotKind.BUFFER:
            value = buffers_of(slot.owner)[slot.path[0]]
        case SlotKind.ATTRIBUTE:
            value = vars(slot.owner)[slot.path[0]]
            for key in slot.path[1:]:
                value = getattr(value, key) if _form(type(value)) is _Form.DATACLASS else value[key]
    return value


def leaks(module: nn.Module) -> tuple[str, ...]:
    """Name every parameter, buffer and plain tensor attribute that is still on meta, without data."""
    return tuple(slot.name for slot in slots(module) if slot.tensor.is_meta)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is neither sharded nor quantised nor lazy."""
    return not is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, UninitializedTensorMixin)


class _Form(Enum):
    """How a value holds tensors."""

    NONE = auto()
    TENSOR = auto()
    SEQUENCE = auto()
    MAPPING = auto()
    DATACLASS = auto()


def _is_config(cls: type) -> bool:
    """Whether it is a config of transformers, whatever the installed version names its base."""
    return any(base.__module__ == _CONFIGS and base.__name__.lower() == "pretrainedconfig" for base in cls.__mro__)


@lru_cache(maxsize=4096)
def _form(cls: type) -> _Form:
    if issubclass(cls, torch.Tensor):
        return _Form.TENSOR
    if issubclass(cls, nn.Module) or _is_config(cls):
        return _Form.NONE
    if issubclass(cls, (list, tuple)):
        return _Form.SEQUENCE
    if issubclass(cls, dict):
        return _Form.MAPPING
    return _Form.DATACLASS if is_dataclass(cls) else _Form.NONE


def _collect(module: nn.Module, prefix: str, modules: dict[int, tuple[nn.Module, list[str]]], above: set[int]) -> None:
    """Collect every module once, with the prefixes of all its paths."""
    key = id(module)
    if key in above:  # a module that contains itself: its further names have no end
        return
    modules.setdefault(key, (module, []))[1].append(prefix)
    above.add(key)
    for name, child in children_of(module).items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", modules, above)
    above.discard(key)


def _attributes(owner: nn.Module) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor]]:
    for key, value in vars(owner).items():
        if key in _OF_EVERY_MODULE:
            continue
        match _form(type(value)):
            case _Form.NONE:
                pass
            case _Form.TENSOR:
                yield key, (key,), value
            case _:
                yield from _inside(value, key, (key,), ())


def _inside(
    holder: Any, label: str, path: tuple[Any, ...], above: tuple[int, ...]
) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors of a container, with the name and path of each."""
    if len(above) == _MOST_NESTED or id(holder) in above:
        return
    form = _form(type(holder))
    for key, value in _items(holder, form):
        inner = _form(type(value))
        if inner is _Form.NONE:
            continue
        name = f"{label}.{key}" if form is _Form.DATACLASS else f"{label}[{key!r}]"
        if inner is _Form.TENSOR:
            yield name, (*path, key), value
        else:
            yield from _inside(value, name, (*path, key), (*above, id(holder)))


def _items(holder: Any, form: _Form) -> list[tuple[Any, Any]]:
    if form is _Form.MAPPING:
        return list(holder.items())
    if form is _Form.SEQUENCE:
        return list(enumerate(holder))
    names = [field.name for field in fields(holder)]
    return [(name, getattr(holder, name)) for name in names if hasattr(holder, name)]


def _replaced(holder: Any, path: tuple[Any, ...], tensor: torch.Tensor) -> Any:
    """Replace a tensor inside a container: in place where possible, else in a copy."""
    if not path:
        return tensor
    key = path[0]
    if _form(type(holder)) is _Form.DATACLASS:
        value = _replaced(getattr(holder, key), path[1:], tensor)
        if type(holder).__dataclass_params__.frozen:
            # Not dataclasses.replace: it runs __post_init__ again and refuses fields that are not arguments.
            holder = copy.copy(holder)
        object.__setattr__(holder, key, value)
        return holder
    value = _replaced(holder[key], path[1:], tensor)
    if not isinstance(holder, tuple):
        holder[key] = value
        return holder
    items = [*holder[:key], value, *holder[key + 1 :]]
    cls: Any = type(holder)
    return cls._make(items) if hasattr(cls, "_make") else cls(items)


def floats_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a module's output; caches, which are objects, are left out."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floats_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from floats_of(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from floats_of(getattr(output, field.name))
