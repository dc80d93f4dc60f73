"""Load, gather and restore a trial's model of which each process holds a shard."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Makes the trial's model, given what makes its pretrained parts."""

Gathered = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the whole tensor, given its name and this process's shard of it."""


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """How a trial's model is made, whatever part of it a process holds.

    Attributes:
        build: Makes the model, given what makes its pretrained parts.
        regularization: Dropouts, and how many layers are frozen.
        device: Where tensors go.
    """

    build: Build
    regularization: RegularizationSettings
    device: str


def empty_model(recipe: ModelRecipe) -> TaskModel:
    """Return the whole model on the meta device."""
    regularization = recipe.regularization
    return recipe.build(lambda source, kind, part="", dtype=None: _empty(source, kind, dtype, regularization))


def filled_slices(
    recipe: ModelRecipe, whole: TaskModel, parts: Mapping[str, StoredSlice]
) -> tuple[TaskModel, LoadReport]:
    """Return the model with a slice of some parameters; no more of the files is read than these slices.

    Parameters without a file are drawn whole and sliced, so that all processes hold slices of one tensor.

    Args:
        recipe: How the model is made.
        whole: The whole model, on the meta device.
        parts: The slice that is held, by every name of each parameter that is not held whole.

    Raises:
        LoadError: As for a whole model.
        ConfigError: A part cannot be sliced before it is filled.
    """
    device = torch.device(recipe.device)

    def make(source: ModelSettings, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None) -> PreTrainedModel:
        model = _empty(source, kind, dtype, recipe.regularization)
        base = whole.pretrained()[part]
        prefix = next(f"{path}." for path, one in whole.named_modules() if one is base)
        own = {unwrapped(name.removeprefix(prefix)): one for name, one in parts.items() if name.startswith(prefix)}
        fill_pretrained(model, source, kind, LoadOptions(device, dtype, parts=own))
        return model

    model = recipe.build(make)
    shapes = {name: one.shape for name, one in whole.named_parameters(remove_duplicate=False)}
    named = dict(model.named_parameters(remove_duplicate=False))
    _refuse_other_shapes([name for name, one in named.items() if is_deferred(one) and one.shape != shapes[name]])
    # Whole until now: parameters still to be drawn, and those that a constructor has given values.
    left = {name: part for name, part in parts.items() if named[name].shape == shapes[name]}
    return model, fill(model, None, LoadOptions(device, missing=model.drawn, parts=left))


def _empty(
    source: ModelSettings, kind: Kind, dtype: torch.dtype | None, regularization: RegularizationSettings
) -> PreTrainedModel:
    if dtype is torch.int8:
        raise ConfigError(
            "sharding a trial's model over processes",
            'lora.base is "int8"',
            "fp32, fp16 or bf16",
            "leave execution.tp and execution.dp out",
        )
    return empty_stack(source, kind, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)


def _refuse_other_shapes(wrong: Sequence[str]) -> None:
    """Refuse parameters that were constructed at the size of a slice but must be drawn whole."""
    if wrong:
        raise ConfigError(
            "sharding a trial's model over processes",
            f"what is put on its layers has the shape of slices: {few(wrong)}",
            allowed="adapters on linear layers",
            hint="leave execution.tp and execution.dp out",
        )


def _saved(model: TaskModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are saved, with their names; of a model with adapters only these."""
    adapted = model.adapted()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if adapted is None or any(fnmatchcase(name, pattern) for pattern in model.drawn):
            yield name, tensor


def whole_model(model: TaskModel, recipe: ModelRecipe, gathered: Gathered, *, keep: bool) -> TaskModel | None:
    """Gather the saved tensors of a sharded model, one at a time, into a whole model on the CPU.

    Args:
        model: This process's shard.
        recipe: How the model is made.
        gathered: Called once for each tensor, in the same order on all processes.
        keep: Whether this process wants the whole model; else it only helps, and gets None.
    """
    state = _whole_state(model, gathered, keep=keep)
    if not keep:
        return None
    whole = empty_model(recipe)
    _put_together(whole, state)
    return whole


def _whole_state(model: TaskModel, gathered: Gathered, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the saved tensors of a sharded model, whole, on the CPU; tied ones once. Empty where not kept."""
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
    """Give a model on the meta device the tensors of a state; the others stay on meta."""
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
    """Read this process's slices of a saved whole model; nothing changes unless every tensor has its place.

    Args:
        model: Changed in place.
        folder: Where the whole model was saved.
        parts: The slice that is held, by name; tensors without a row are held whole.
        shape_of: Returns a whole tensor's shape, given its name and this process's shard.
        local: Returns the memory to write a parameter's slice to.

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
        saved, shape = tuple(stored.tensors[key].shape), shape_of(name_of[key], places[key])
        wrong += [f"{key}: {list(saved)} in the file, not {list(shape)}"] if saved != shape else []
    if wrong:
        raise LoadError(f"restoring a sharded model from {folder}", few(wrong), allowed="what was saved of this model")
    wanted = {key: parts[name_of[key]] for key in stored.tensors if name_of[key] in parts}
    with CheckpointReader(stored, ReadMode.PRIVATE) as reader, torch.no_grad():
        for key, tensor in reader.tensors(stored.tensors, wanted):
            local(places[key]).copy_(tensor)


def change_state(
    state: dict[str, Any], order: list[nn.Parameter], change: Callable[[nn.Parameter, Any], Any]
) -> dict[str, Any]:
    """Change each value of an optimizer's saved state, in the same order on all processes.

    Args:
        state: As ``state_dict`` gives it.
        order: The optimizer's parameters.
        change: Returns the new value, given the parameter and the old one.
    """
    changed = {
        index: {name: change(order[index], value) for name, value in sorted(values.items())}
        for index, values in sorted(state["state"].items())
    }
    return {**state, "state": changed}
