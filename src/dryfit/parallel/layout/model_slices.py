"""A trial's model in parts on several processes: filled with slices, put together whole, restored from a whole file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.tables import ModelSettings, RegularizationSettings
from dryfit.core.text.words import few
from dryfit.meta.construction.tape import is_deferred
from dryfit.meta.construction.walk import put, slots
from dryfit.meta.files.checkpoint_files import open_checkpoint
from dryfit.meta.files.reading import CheckpointReader, ReadMode
from dryfit.meta.files.stored_slices import StoredSlice
from dryfit.meta.loading.adapters import adapter_state
from dryfit.meta.loading.filling import fill, unwrapped
from dryfit.meta.loading.matching import LoadOptions
from dryfit.meta.loading.pretrained import Kind, empty_stack, fill_pretrained
from dryfit.tasks.base import MakeBase, TaskModel
from dryfit.tasks.saved.saved_model import weights_file

Build = Callable[[MakeBase], TaskModel]
"""From what makes pretrained models to the trial's."""

Gathered = Callable[[str, torch.Tensor], torch.Tensor]
"""All of a tensor, by its name and what is here of it."""


def empty_model(build: Build, regularization: RegularizationSettings) -> TaskModel:
    """The trial's model without memory."""
    return build(lambda source, kind, part="", dtype=None: _empty(source, kind, dtype, regularization))


def filled_slices(
    build: Build,
    whole: TaskModel,
    parts: Mapping[str, StoredSlice],
    regularization: RegularizationSettings,
    device: str,
) -> tuple[TaskModel, LoadReport]:
    """The trial's model with a part of some parameters: pretrained ones read from their files, others drawn and cut.

    Args:
        build: Makes the trial's model from pretrained ones.
        whole: The same without memory.
        parts: Which part of a parameter is held, by every name of each that is not whole.
        regularization: Its dropouts.
        device: Where it lies.

    Raises:
        LoadError: As for a whole model.
        ConfigError: A part cannot be cut before it is filled.
    """

    def make(source: ModelSettings, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None) -> PreTrainedModel:
        model = _empty(source, kind, dtype, regularization)
        base = whole.pretrained()[part]
        prefix = next(f"{path}." for path, one in whole.named_modules() if one is base)
        own = {unwrapped(name.removeprefix(prefix)): one for name, one in parts.items() if name.startswith(prefix)}
        fill_pretrained(model, source, kind, LoadOptions(torch.device(device), dtype, parts=own))
        return model

    model = build(make)
    shapes = {name: one.shape for name, one in whole.named_parameters(remove_duplicate=False)}
    named = dict(model.named_parameters(remove_duplicate=False))
    _refuse_other_shapes([name for name, one in named.items() if is_deferred(one) and one.shape != shapes[name]])
    # Whole as yet: what is still to be drawn, and what its constructor has given its numbers.
    left = {name: part for name, part in parts.items() if named[name].shape == shapes[name]}
    return model, fill(model, None, LoadOptions(torch.device(device), missing=model.drawn, parts=left))


def _empty(
    source: ModelSettings, kind: Kind, dtype: torch.dtype | None, regularization: RegularizationSettings
) -> PreTrainedModel:
    if dtype is torch.int8:
        raise ConfigError(
            "dividing a trial's model among processes",
            'lora.base is "int8"',
            "fp32, fp16 or bf16",
            "leave execution.tp and execution.dp out",
        )
    return empty_stack(source, kind, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)


def _refuse_other_shapes(wrong: Sequence[str]) -> None:
    """Refuse what was made for slices where it will be cut from what is made for the whole."""
    if wrong:
        raise ConfigError(
            "dividing a trial's model among processes",
            f"what is put on its layers has the shape of slices: {few(wrong)}",
            allowed="adapters on linear layers",
            hint="leave execution.tp and execution.dp out",
        )


def _saved(model: TaskModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model that are saved, by name: of one with adapters these alone."""
    adapted = model.adapted()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if adapted is None or any(fnmatchcase(name, pattern) for pattern in model.drawn):
            yield name, tensor


def whole_model(
    model: TaskModel,
    empty: Callable[[], TaskModel],
    gathered: Callable[[str, torch.Tensor], torch.Tensor],
    *,
    keep: bool,
) -> TaskModel | None:
    """A model of its own on the CPU with all that is saved of a divided one, put together one tensor at a time.

    Args:
        model: With parts of its tensors.
        empty: Makes the whole model without memory.
        gathered: Called once for each tensor, in the same order on all processes.
        keep: Whether it is wanted here; a process that does not want it helps only, and gets None.
    """
    state = _whole_state(model, gathered, keep=keep)
    if not keep:
        return None
    whole = empty()
    _put_together(whole, state)
    return whole


def _whole_state(model: TaskModel, gathered: Gathered, *, keep: bool) -> dict[str, torch.Tensor]:
    """What is saved of a divided model, on the CPU; tied tensors are one. Empty where it is not kept."""
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, local in _saved(model):
        if id(local) not in made:
            whole = gathered(name, local.detach())
            made[id(local)] = whole.to("cpu", copy=True) if keep else local
        if keep:
            state[name] = made[id(local)]
    return state


def _put_together(whole: TaskModel, state: Mapping[str, torch.Tensor]) -> None:
    """Give a model without memory the tensors of a state; what the state lacks stays without."""
    made: dict[int, torch.Tensor] = {}
    for slot in slots(whole):
        tensor = state.get(slot.name)
        if tensor is not None:
            if id(slot.tensor) not in made:
                made[id(slot.tensor)] = _as(slot.tensor, tensor)
            put(slot, made[id(slot.tensor)])


def _as(old: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def restore_slices(
    model: TaskModel,
    folder: Path,
    parts: Mapping[str, StoredSlice],
    shape_of: Callable[[str, torch.Tensor], tuple[int, ...]],
    local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> None:
    """Give a divided model its part of what was saved of the whole; nothing changes unless all have their places.

    Args:
        model: Changed in place.
        folder: Where the whole was saved.
        parts: Which part of a tensor is here, by its name; all of those that are not named.
        shape_of: The shape of all of a tensor, by its name and what is here of it.
        local: The tensor to write to.

    Raises:
        LoadError: A weight is missing, has no place or another shape, or the file is damaged.
    """
    stored = open_checkpoint(folder / weights_file(model))
    state = model.state_dict(keep_vars=True)
    adapted = model.adapted()
    places = state if adapted is None else adapter_state(adapted, adapted.state_dict(keep_vars=True))
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    name_of = {key: first[id(tensor)] for key, tensor in places.items()}
    given = {name_of[key] for key in stored.tensors if key in places}
    wrong = [f"{key} has no place" for key in stored.tensors if key not in places]
    wrong += [f"{key} is missing" for key in places if name_of[key] not in given]
    for key in stored.tensors.keys() & places.keys():
        found, shape = tuple(stored.tensors[key].shape), shape_of(name_of[key], places[key])
        wrong += [f"{key}: {list(found)} in the file, not {list(shape)}"] if found != shape else []
    if wrong:
        raise LoadError(f"restoring a divided model from {folder}", few(wrong), allowed="what was saved of this model")
    wanted = {key: parts[name_of[key]] for key in stored.tensors if name_of[key] in parts}
    with CheckpointReader(stored, ReadMode.PRIVATE) as reader, torch.no_grad():
        for key, tensor in reader.tensors(stored.tensors, wanted):
            local(places[key]).copy_(tensor)


def change_state(
    state: dict[str, Any], order: list[nn.Parameter], change: Callable[[nn.Parameter, Any], Any]
) -> dict[str, Any]:
    """An optimizer's saved state with each value of each parameter changed, in the same order on all processes.

    Args:
        state: As ``state_dict`` gives it.
        order: Its parameters.
        change: A parameter and a value of its state to the new value.
    """
    changed = {
        index: {name: change(order[index], value) for name, value in sorted(values.items())}
        for index, values in sorted(state["state"].items())
    }
    return {**state, "state": changed}
