"""What training asks of several ranks: how a model lies on them, its slices, and which rows each has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dryfit.gpu.slots import put_all
from dryfit.meta.adapters import adapter_state
from dryfit.meta.checkpoint_files import open_checkpoint
from dryfit.meta.filling import fill, unwrapped
from dryfit.meta.keys import StoredSlice
from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import Kind, empty_stack, fill_frozen
from dryfit.meta.reading import CheckpointReader, ReadMode
from dryfit.meta.tape import is_deferred
from dryfit.parallel.processes import ProcessGroup, RankGroup, SingleProcess
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.errors import ConfigError, LoadError
from dryfit.settings.execution import WeightFormat, check_sharded
from dryfit.settings.tables import ModelSettings, RegularizationSettings
from dryfit.settings.text import few
from dryfit.tasks.base import MakeBase, Task, TaskModel
from dryfit.tasks.saved_models import restore, weights_file

# Split the rows of a batch over the processes of a trial and into micro-batches.


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of a batch that go through the model at once.

    Attributes:
        first: Index of the first row.
        rows: Number of rows.
        weighs: Whether they are learned from; False for a pass that only keeps step with the other processes.
    """

    first: int
    rows: int
    weighs: bool = True


def portions(rows: int, micro_batch: int, *, rank: int = 0, size: int = 1) -> tuple[Portion, ...]:
    """Return the rows that go through the model on one process; every process makes as many passes.

    Shares are consecutive rows and differ by one row at most. A process with fewer passes to make than another passes
    the batch's first row meanwhile and learns nothing from it.

    Args:
        rows: Rows of the batch.
        micro_batch: Rows at once on each process.
        rank: Number of the process.
        size: Number of processes.
    """
    begin, end = rank * rows // size, (rank + 1) * rows // size
    own = [Portion(first, min(micro_batch, end - first)) for first in range(begin, end, micro_batch)]
    largest = -(-rows // size)
    passes = -(-largest // micro_batch)
    return (*own, *[Portion(0, 1, weighs=False)] * (passes - len(own)))


# The interface between training and a model's layout on its processes: whole, tensor-parallel or FSDP.


Gathered = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the whole tensor, given the parameter's name and this process's shard of it."""


class Layout(Protocol):
    """How a trial's model lies on its processes. All of them make the same calls in the same order."""

    @property
    def group(self) -> ProcessGroup:
        """The processes that train the trial."""
        ...

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """Return the rows of a batch that go through the model here; every process makes as many passes."""
        ...

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context for a step's passes that says where their random numbers on a device come from."""
        ...

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a batch's loss, given that of the rows that went through here; the same on each process."""
        ...

    def task_here(self, task: Task) -> Task:
        """Return the task as it is trained and validated here, with outputs as this process's model gives them."""
        ...

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the 2-norm of the whole model's gradients, the same on each rank."""
        ...

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return the whole model on rank 0, for saving; None on the others.

        Where adapters alone are saved, its other weights may be on the meta device.
        """
        ...

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Give the model the weights of a saved whole model, in place.

        Raises:
            LoadError: A weight is missing, has no place or another shape, or the file is damaged.
        """
        ...

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer save and load the whole model's state."""
        ...


class AllRows:
    """All rows of a batch go through the model on each process, with the same random numbers."""

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """Return all rows."""
        return portions(rows, micro_batch)

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Draw from torch's generator, alike on all; regions of a tensor-parallel model have streams of their own."""
        return nullcontext()

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss: each process has computed all of it."""
        return loss


@final
class OneProcess(AllRows):
    """The whole model in this process."""

    def __init__(self) -> None:
        self.group = SingleProcess()

    def task_here(self, task: Task) -> Task:
        """Return the task itself."""
        return task

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm as torch computes it."""
        return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])

    def gathered(self, model: TaskModel) -> Gathered:
        """Return the identity."""
        return lambda _, tensor: tensor

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return the model itself."""
        return model

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Read the saved weights."""
        restore(model, folder, LoadOptions(next(model.parameters()).device))

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: it is the whole model's."""


# Load, gather and restore a trial's model of which each process holds a shard.


Build = Callable[[MakeBase], TaskModel]
"""Makes the trial's model, given what makes its pretrained parts."""


Sharded = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns this process's shard of a whole tensor of a parameter's shape, given its name; any other tensor as it is."""


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
    return recipe.build(lambda source, kind, part="", frozen=None: _empty(source, kind, frozen, regularization))


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

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        model = _empty(source, kind, frozen, recipe.regularization)
        base = whole.pretrained()[part]
        prefix = next(f"{path}." for path, one in whole.named_modules() if one is base)
        own = {unwrapped(name.removeprefix(prefix)): one for name, one in parts.items() if name.startswith(prefix)}
        fill_frozen(model, source, kind, frozen, LoadOptions(device, parts=own))
        return model

    model = recipe.build(make)
    shapes = {name: one.shape for name, one in whole.named_parameters(remove_duplicate=False)}
    named = dict(model.named_parameters(remove_duplicate=False))
    _refuse_other_shapes([name for name, one in named.items() if is_deferred(one) and one.shape != shapes[name]])
    # Whole until now: parameters still to be drawn, and those that a constructor has given values.
    left = {name: part for name, part in parts.items() if named[name].shape == shapes[name]}
    return model, fill(model, None, LoadOptions(device, missing=model.drawn, parts=left))


def _empty(
    source: ModelSettings, kind: Kind, frozen: WeightFormat | None, regularization: RegularizationSettings
) -> PreTrainedModel:
    if frozen is not None:
        check_sharded(frozen)
    return empty_stack(source, kind, regularization)


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


def whole_state(model: TaskModel, gathered: Gathered, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the saved tensors of a model, gathered one at a time, on the CPU; tied ones once.

    Args:
        model: This process's shard.
        gathered: Called once for each tensor, in the same order on all processes.
        keep: Whether this process wants the tensors; else it only helps, and gets none.
    """
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, local in _saved(model):
        if id(local) not in made:
            whole = gathered(name, local.detach())
            made[id(local)] = whole.to("cpu", copy=True) if keep else local
        if keep:
            state[name] = made[id(local)]
    return state


class ShardedLayout(AllRows, ABC):
    """A layout whose processes hold a shard of the model each.

    Args:
        recipe: How the model is made.
        group: This process among the others.
    """

    def __init__(self, recipe: ModelRecipe, group: RankGroup) -> None:
        self.recipe = recipe
        self.group = group

    @abstractmethod
    def load(self, whole: TaskModel) -> tuple[TaskModel, LoadReport]:
        """Load this process's shard of a model, given the whole one on the meta device."""

    @abstractmethod
    def connect(self, model: TaskModel) -> None:
        """Make the processes' models compute together; called once it is known which parameters are trained."""

    @abstractmethod
    def gathered(self, model: TaskModel) -> Gathered:
        """Return what puts a parameter together, or a tensor of its shape; every process calls it for each of them."""

    @abstractmethod
    def sharded(self, model: TaskModel) -> Sharded:
        """Return what takes this process's shard of a whole tensor that goes element by element with a parameter."""

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return a copy on the CPU, gathered one tensor at a time."""
        state = whole_state(model, self.gathered(model), keep=self.group.rank == 0)
        if self.group.rank:
            return None
        whole = empty_model(self.recipe)
        put_all(whole, lambda slot: state.get(slot.name))
        return whole

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Gather moments, and whatever else has a parameter's shape, on saving; shard them on loading."""
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        order = [one for group in optimizer.param_groups for one in group["params"]]
        gathered, sharded = self.gathered(model), self.sharded(model)

        def whole_of(parameter: nn.Parameter, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                return value
            whole = gathered(name_of[id(parameter)], value)
            return value if whole is value or self.group.rank else whole.cpu()

        def shard_of(parameter: nn.Parameter, value: Any) -> Any:
            return sharded(name_of[id(parameter)], value) if isinstance(value, torch.Tensor) else value

        optimizer.register_state_dict_post_hook(lambda _, state: _changed(state, order, whole_of))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: _changed(state, order, shard_of))


def restore_slices(
    model: TaskModel,
    folder: Path,
    parts: Mapping[str, StoredSlice],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Read this process's slices of a saved whole model; nothing changes unless every tensor has its place.

    Args:
        model: Changed in place.
        folder: Where the whole model was saved.
        parts: The slice that is held, by name; tensors without a row are held whole.
        shapes: The whole tensor's shape, by name; without a row the shard's own says it.

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
        saved, shape = tuple(stored.tensors[key].shape), shapes.get(name_of[key], tuple(places[key].shape))
        wrong += [f"{key}: {list(saved)} in the file, not {list(shape)}"] if saved != shape else []
    if wrong:
        raise LoadError(f"restoring a sharded model from {folder}", few(wrong), allowed="what was saved of this model")
    wanted = {key: parts[name_of[key]] for key in stored.tensors if name_of[key] in parts}
    with CheckpointReader(stored, ReadMode.PRIVATE) as reader, torch.no_grad():
        for key, tensor in reader.tensors(stored.tensors, wanted):
            local_shard(places[key]).copy_(tensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's memory of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _changed(
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
