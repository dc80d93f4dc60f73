"""Moves of a module between devices and dtypes, and refusal of weights that lie elsewhere."""

import gc
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]
from torch.optim import Optimizer

from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_modes import MODES, is_traceable_wrapper_subclass
from dryfit.gpu.private_apis.torch_modules import MODULES, parameters_of
from dryfit.gpu.private_apis.torch_tensors import TENSORS, on_same_memory, storage_key, takes_data
from dryfit.gpu.slots import Slot, SlotKind, leaks, put, slots
from dryfit.settings.errors import LoadError, MachineError
from dryfit.settings.private_names import require
from dryfit.settings.text import few, gib

# Move a module between devices and dtypes, keeping ties, buffers' types and plain tensor attributes.
#
# ``nn.Module.to`` fails half-way on a module that is partly on meta, leaves plain tensor attributes behind, unties
# tensors that share memory, and converts buffers that must stay fp32 (rotary tables). This does not.


# Storage offsets are multiples of the size of an element, and no element is larger than complex128.
_LARGEST_ELEMENT_BYTES = 16
_NOTHING = torch.empty(0)


def move(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    """Move a module in place: parameters, buffers and plain tensor attributes, one after the other.

    Kept: values, ties (also between views that overlap in memory), ``requires_grad``, the persistence of buffers,
    classes and attributes of parameters, gradients, and the parameter objects themselves wherever torch can change
    them in place, so that optimizers stay valid. Parameters get new objects on the way to meta and away from it.

    ``dtype`` converts floating-point parameters and their gradients. Buffers and plain tensors keep theirs (tables
    such as rotary frequencies need fp32) unless they share memory with a parameter; so do integer parameters and
    one-byte floats, which are quantised values whose scales live elsewhere.

    A plain tensor attribute that is the result of a computation moves without its graph.

    Args:
        module: Any module, also without parameters.
        device: Where to; meta drops all data.
        dtype: Floating-point type of the parameters; None keeps each one's.

    Returns:
        The same module.

    Raises:
        LoadError: A tensor that needs data has none; nothing was changed then.
        MachineError: The machine has no such device.
    """
    doing = f"moving {type(module).__name__} to {device}" + (f" as {dtype}" if dtype else "")
    if dtype is not None and not dtype.is_floating_point:
        raise LoadError(doing, f"{dtype} is not a floating-point type", allowed="torch.float32, torch.bfloat16, ...")
    target = existing_device(device, doing)
    require("moving a model", MODES, MODULES, TENSORS)
    tensor_slots = slots(module)
    _refuse_without_data(tensor_slots, target, doing)
    groups = _groups(tensor_slots, dtype, doing)
    del tensor_slots  # so that each old tensor is freed before the next is copied
    _move_all(groups, target, doing)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()  # cuDNN wants the weights of a recurrent module side by side
    return module


@dataclass(slots=True, eq=False)
class _Item:
    """A tensor object and every slot that holds it."""

    tensor: torch.Tensor
    places: list[Slot]
    has_parameter: bool


@dataclass(slots=True, eq=False)
class _Group:
    """Tensors that overlap in memory (mostly one), and their new type; None keeps each one's."""

    items: list[_Item]
    dtype: torch.dtype | None

    def numel(self) -> int:
        return max(item.tensor.numel() for item in self.items)


def existing_device(device: torch.device | str, doing: str) -> torch.device:
    """Return a device that exists, with the index that ``cuda`` alone lacks.

    Raises:
        MachineError: This machine has no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MachineError(doing, str(error).strip().splitlines()[0], allowed="a device of this machine") from error


def _refuse_without_data(tensor_slots: list[Slot], target: torch.device, doing: str) -> None:
    unshaped = [slot.name for slot in tensor_slots if isinstance(slot.tensor, UninitializedTensorMixin)]
    if unshaped:
        raise LoadError(
            doing,
            f"{len(unshaped)} lazy parameters have no shape yet ({few(unshaped)})",
            hint="run the module once on an example first",
        )
    if target.type == "meta":
        return
    empty = [slot.name for slot in tensor_slots if slot.tensor.is_meta]
    empty += [f"{slot.name}.grad" for slot in tensor_slots if _gradient_is_meta(slot.tensor)]
    if empty:
        raise LoadError(
            doing,
            f"{len(empty)} of {len(tensor_slots)} tensors have no data, they are on meta ({few(empty)})",
            allowed="a module whose every parameter, buffer and plain tensor has data",
            hint="call dryfit.meta.materialise(module, checkpoint, device=...) in place of a move; nothing was changed",
        )


def _gradient_is_meta(tensor: torch.Tensor) -> bool:
    gradient = _gradient(tensor)
    return gradient is not None and gradient.is_meta and not tensor.is_meta


def _groups(tensor_slots: list[Slot], dtype: torch.dtype | None, doing: str) -> list[_Group]:
    items: dict[int, _Item] = {}
    for slot in tensor_slots:
        item = items.setdefault(id(slot.tensor), _Item(slot.tensor, [], False))
        # Without the tensor: a slot would keep it alive until the whole module has moved.
        item.places.append(replace(slot, tensor=_NOTHING))
        item.has_parameter |= slot.kind is SlotKind.PARAMETER
    groups: list[list[_Item]] = []
    storages: dict[int, list[_Item]] = defaultdict(list)
    for item in items.values():
        if _has_plain_storage(item.tensor) and item.tensor.numel():
            storages[storage_key(item.tensor)].append(item)
        else:
            groups.append([item])
    for sharing in storages.values():
        groups += _overlapping(sharing) if len(sharing) > 1 else [sharing]
    return [_Group(group, _new_dtype(group, dtype, doing)) for group in groups]


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided view of a storage and nothing besides."""
    return (
        tensor.layout is torch.strided
        and not isinstance(tensor, FakeTensor)
        and not is_traceable_wrapper_subclass(tensor)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _range_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the byte range that a non-empty tensor spans in its storage."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _overlapping(items: list[_Item]) -> list[list[_Item]]:
    """Split the tensors of one storage into groups that overlap; many may lie side by side in one file's buffer."""
    groups: list[list[_Item]] = []
    end = -1
    for (first, last), item in sorted(((_range_bytes(item.tensor), item) for item in items), key=lambda pair: pair[0]):
        if first < end:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = max(end, last)
    return groups


def _new_dtype(group: list[_Item], dtype: torch.dtype | None, doing: str) -> torch.dtype | None:
    def converts(item: _Item) -> bool:
        return item.has_parameter and item.tensor.is_floating_point() and item.tensor.itemsize > 1

    if dtype is None or not any(converts(item) for item in group):
        return None
    if len({item.tensor.dtype for item in group}) > 1:
        names = [f"{item.places[0].name} ({item.tensor.dtype})" for item in group]
        raise LoadError(
            doing,
            f"{', '.join(names)} share memory as different types",
            allowed="a change of type only where all that share memory have one type",
            hint="move without dtype; nothing was changed",
        )
    return dtype


def _move_all(groups: list[_Group], target: torch.device, doing: str) -> None:
    # The largest first: if memory does not suffice, nothing has been changed yet.
    groups.sort(key=_Group.numel)
    total = len(groups)
    try:
        with torch.no_grad():
            while groups:
                group = groups.pop()
                if not _stays(group, target):
                    _install(group, _copied(group, target, group.dtype), _gradients(group, target, group.dtype))
    except RuntimeError as error:
        if len(groups) < total - 1:
            error.add_note(f"{doing} failed half-way: free memory, and load the model anew")
        raise


def _stays(group: _Group, target: torch.device) -> bool:
    held = [tensor for item in group.items for tensor in (item.tensor, _gradient(item.tensor)) if tensor is not None]
    return all(tensor.device == target and tensor.dtype == (group.dtype or tensor.dtype) for tensor in held)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _copied(group: _Group, target: torch.device, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Copy the tensors of a group to a device, overlapping as they do now."""
    tensors = [item.tensor.detach() for item in group.items]
    first = tensors[0]
    if not _has_plain_storage(first) or not first.numel():
        return [first.to(device=target, dtype=dtype or first.dtype)]
    ranges = [_range_bytes(tensor) for tensor in tensors]
    start, end = min(low for low, _ in ranges), max(high for _, high in ranges)
    geometries = {(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in tensors}
    if len(geometries) == 1 and end - start > first.nbytes:
        moved = first.to(device=target, dtype=dtype or first.dtype, copy=True)  # its gaps are not copied
        return [moved.detach() for _ in tensors]
    # As elements where they are converted, else as bytes: the views of one memory may be of several types.
    unit = first.dtype if dtype else torch.uint8
    start -= 0 if dtype else start % _LARGEST_ELEMENT_BYTES
    length = (end - start) // unit.itemsize
    base = _view(first.untyped_storage(), unit, first.device, start // unit.itemsize, (length,), (1,))
    storage = base.to(device=target, dtype=dtype or unit, copy=True).untyped_storage()
    return [
        _view(storage, dtype or t.dtype, target, int(t.storage_offset()) - start // t.itemsize, t.shape, t.stride())
        for t in tensors
    ]


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    empty: Any = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage, offset, shape, stride)


def _gradients(group: _Group, target: torch.device, dtype: torch.dtype | None) -> list[torch.Tensor | None]:
    gradients = [_gradient(item.tensor) for item in group.items]
    return [
        None if gradient is None else gradient.detach().to(device=target, dtype=(dtype or gradient.dtype))
        for gradient in gradients
    ]


def _install(group: _Group, moved: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    for item, data, gradient in zip(group.items, moved, gradients, strict=True):
        old = item.tensor
        if isinstance(old, nn.Parameter) and _changes_in_place(old, data):
            held = old.grad
            old.data = data
            if held is not None and gradient is not None:
                held.data = gradient
            continue
        item.tensor = _like(old, data, gradient)
        for slot in item.places:
            put(slot, item.tensor)


def _changes_in_place(old: torch.Tensor, data: torch.Tensor) -> bool:
    if old.is_inference() or isinstance(data, FakeTensor) or is_traceable_wrapper_subclass(data):
        return False
    return takes_data(old, data)


def _like(old: torch.Tensor, data: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return data with the old tensor's class, flags and Python attributes."""
    if type(old) is type(data):
        new = data
    elif type(data) is not torch.Tensor:
        new = nn.Parameter(data, requires_grad=old.requires_grad)  # a wrapper that only says it is a parameter
    else:
        new = on_same_memory(type(old), data)
    if old.is_leaf and new.requires_grad != old.requires_grad:
        new.requires_grad_(old.requires_grad)
    vars(new).update(vars(old))
    if gradient is not None:
        new.grad = gradient
    return new


# Refuse models and optimizers whose weights lie elsewhere (disk, host, meta) and could not be trained exactly.
#
# Weights that are streamed in for each forward (offloading to CPU memory or disk) get no gradient, or a wrong one,
# and an optimizer that was built before the weights came keeps updating unused tensors. Neither raises by itself.


def refuse_offload(module: nn.Module, *, doing: str) -> None:
    """Refuse a model whose weights are not all where they are trained.

    Args:
        module: The model about to be trained.
        doing: The first part of the message: ``"training trial 7"``.

    Raises:
        LoadError: Part of it is on meta (where accelerate leaves weights that it streams in from elsewhere), or
            on the host while the rest is on a device. The message has a plan that trains it.
    """
    lost, places = leaks(module), {parameter.device.type for parameter in module.parameters()} - {"meta"}
    problems = [f"{len(lost)} tensors are on meta ({few(lost)})"] if lost else []
    if len(places) > 1:
        problems.append(f"its parameters lie on {' and '.join(sorted(places))}")
    if not problems:
        return
    raise LoadError(
        doing,
        "; ".join(problems) + ": their gradients would be missing or wrong",
        allowed="a model whose every tensor is on the device that trains it",
        hint=f"load it without device_map and offloading, onto one device: its parameters take "
        f"{gib(sum(parameter.nbytes for parameter in module.parameters()))} there; to make room for gradients and "
        "activations, turn on activation checkpointing and lower the micro-batch, with more accumulation steps in "
        "exchange",
    )


def refuse_early_optimizer(module: nn.Module, optimizer: Optimizer, *, doing: str = "checking the optimizer") -> None:
    """Refuse an optimizer that does not hold exactly the parameters the model trains.

    Frozen parameters may be in it or not.

    Raises:
        LoadError: It holds parameters on meta or some that are not the model's, or lacks trainable ones.
    """
    names = {id(slot.tensor): slot.name for slot in reversed(slots(module)) if slot.kind is SlotKind.PARAMETER}
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    on_meta = [names.get(key, "a foreign one") for key, parameter in held.items() if parameter.is_meta]
    foreign = [f"of shape {tuple(parameter.shape)}" for key, parameter in held.items() if key not in names]
    lacking = [names[id(parameter)] for parameter in module.parameters() if _lacks(parameter, held)]
    problems = [
        f"{len(listed)} {what} ({few(listed)})"
        for listed, what in (
            (on_meta, "of its parameters are on meta"),
            (foreign, "of its parameters are not the model's"),
            (lacking, "trainable parameters of the model are not in it"),
        )
        if listed
    ]
    if problems:
        raise LoadError(
            doing,
            f"{type(optimizer).__name__} and the model do not belong together: " + "; ".join(problems),
            allowed="an optimizer of exactly the parameters the model trains",
            hint="build the optimizer after the model has its weights and adapters; freeze what it leaves out",
        )


def early_optimizers(module: nn.Module) -> list[str]:
    """Describe the optimizers alive in this process that hold parameters of a module that are still on meta.

    Costs some milliseconds while nobody besides the module refers to those parameters. Otherwise every object of the
    garbage collector is checked: 0.2 s for a million.

    Returns:
        One phrase for each optimizer: ``"AdamW, which holds 38 of these 39 parameters"``.
    """
    if not _held_elsewhere(module):
        return []
    wanted = {id(parameter) for parameter in module.parameters() if parameter.is_meta}
    if not _holders(wanted):
        return []
    # A dropped optimizer may still be in a reference cycle (with its scheduler); it does no harm.
    gc.collect()
    return [
        f"{type(optimizer).__name__}, which holds {count} of these {len(wanted)} parameters"
        for optimizer, count in _holders(wanted)
    ]


def refuse_early_optimizers(module: nn.Module, *, doing: str) -> None:
    """Refuse to give a module its weights while an optimizer holds its empty parameters.

    Raises:
        LoadError: There is such an optimizer.
    """
    optimizers = early_optimizers(module)
    if optimizers:
        raise LoadError(
            doing,
            f"an optimizer was built too early: {'; '.join(optimizers)} on meta, and would go on updating those",
            allowed="optimizers built after the weights are there",
            hint="delete the optimizer (and its scheduler), give the model its weights, then build it",
        )


def _lacks(parameter: nn.Parameter, held: dict[int, Any]) -> bool:
    return parameter.requires_grad and id(parameter) not in held


def _held_elsewhere(module: nn.Module) -> bool:
    """Whether anything besides the module may refer to one of its parameters on meta."""
    # References to a parameter in one table, here and on this version of Python.
    probe = nn.Module()
    probe.register_parameter("only", nn.Parameter(torch.empty(0, device="meta")))
    ((_, alone),) = _references(probe).values()
    counts = _references(module)
    if all(count <= alone - 1 + places for places, count in counts.values()):
        return False
    own = Counter(id(slot.tensor) for slot in slots(module))  # slower: in lists and attributes too, as an LSTM's
    return any(count > alone - 1 + own[key] for key, (_, count) in counts.items())


def _references(module: nn.Module) -> dict[int, tuple[int, int]]:
    """Count, for each parameter on meta by id, the tables it is in and the references to it."""
    counts: dict[int, tuple[int, int]] = {}
    for part in module.modules():
        for parameter in parameters_of(part).values():
            if parameter is not None and parameter.is_meta:
                places = counts.get(id(parameter), (0, 0))[0]
                counts[id(parameter)] = (places + 1, sys.getrefcount(parameter))
    return counts


def _holders(wanted: set[int]) -> list[tuple[Optimizer, int]]:
    kinds, classes = {id(Optimizer)}, [Optimizer]
    while classes:
        below = classes.pop().__subclasses__()
        kinds.update(map(id, below))
        classes.extend(below)
    holders: list[tuple[Optimizer, int]] = []
    objects = gc.get_objects()
    # In C, without a Python step for each: there may be a million.
    for optimizer in compress(objects, map(kinds.__contains__, map(id, map(type, objects)))):
        groups = vars(optimizer).get("param_groups", ())
        count = sum(id(parameter) in wanted for group in groups for parameter in group["params"])
        if count:
            holders.append((optimizer, count))
    return holders
