"""Sharded data parallelism (torch's FSDP2): weights, gradients and optimizer state sharded over the processes.

Each process holds a shard of every parameter, along the first dimension, and computes a share of each batch's rows. A
layer's weights are gathered before it computes and freed afterwards. Its gradients are summed over the processes, and
each keeps its shard of the sum.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.private_names import require
from dryfit.core.text.words import few
from dryfit.meta.construction.walk import SlotKind, put, slots
from dryfit.meta.files.stored_slices import StoredSlice
from dryfit.meta.private_apis.torch_modes import MODES, tree_map_only
from dryfit.meta.private_apis.torch_tensors import TENSORS, is_view
from dryfit.parallel.layout.fsdp_bytes import share_of
from dryfit.parallel.layout.model_slices import (
    ModelRecipe,
    change_state,
    filled_slices,
    restore_slices,
    whole_model,
)
from dryfit.parallel.layout.portions import Portion, portions
from dryfit.parallel.layout.processes import RankGroup
from dryfit.parallel.ranks.collectives import agree
from dryfit.parallel.ranks.streams import RegionStream
from dryfit.tasks.base import Task, TaskModel

_ROWS: Final = Shard(0)
_SHARDING: Final = "sharding a trial's model over processes"


@dataclass(frozen=True, slots=True)
class FsdpBuilder:
    """Builds a process's shard of a trial's model.

    Attributes:
        recipe: How the model is made.
        whole: The whole model, on the meta device.
        group: This process among the others.
    """

    recipe: ModelRecipe
    whole: TaskModel
    group: RankGroup

    def filled(self) -> tuple[TaskModel, LoadReport]:
        """Load this process's shard of each parameter.

        Raises:
            LoadError: As for a whole model.
            ConfigError: A parameter cannot be sharded.
        """
        shapes = shapes_of(self.whole)
        scalars = [name for name, shape in shapes.items() if not shape]
        if scalars:
            problem = f"parameters that are a single number: {few(scalars)}"
            raise ConfigError(_SHARDING, problem, allowed="vectors and matrices")
        return filled_slices(self.recipe, self.whole, self.parts(shapes))

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredSlice]:
        """Return this process's slice of each parameter, given the whole shapes."""
        return {
            name: StoredSlice(0, (share_of(shape[0], self.group.rank, self.group.size),))
            for name, shape in shapes.items()
        }

    def connected(self, model: TaskModel) -> "FsdpLayout":
        """Make the processes' models compute together; called once it is known which parameters are trained."""
        require(_SHARDING, MODES, TENSORS)
        shapes = shapes_of(self.whole)
        agree(self.group.tensors, {"the parameters": _described(model, shapes)})
        mesh = init_device_mesh(self.recipe.device, (self.group.size,))
        held = _without_memory(model, shapes)
        units = list(_units(model))  # before parameters are replaced
        for unit in units:
            unit.register_forward_hook(_without_views)
            sharded = cast("FSDPModule", fully_shard(unit, mesh=mesh, reshard_after_forward=True))
            # The loss was divided by the whole batch's weight already. gloo has no sum of products, so plain sums.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        _take_parts(model, held, mesh)
        for unit in units:
            # The memory for gathered weights is made on first use: made in inference mode, it could not be trained.
            sharded = cast("FSDPModule", unit)
            sharded.unshard()
            sharded.reshard()
        return FsdpLayout(self)


def shapes_of(whole: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a whole model, by every name."""
    return {name: tuple(one.shape) for name, one in whole.named_parameters(remove_duplicate=False)}


def _described(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    named = model.named_parameters(remove_duplicate=False)
    return "\n".join(f"{name} {shapes[name]} {one.dtype} {one.requires_grad}" for name, one in named)


def _units(model: TaskModel) -> Iterator[nn.Module]:
    """Yield modules whose weights are gathered at once, inner ones first.

    Layers are what transformers itself recomputes one by one. The pretrained models are units of their own, since they
    are called without the head in generation. A module that shares weights with others outside it is no unit.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    paths = {module: path for path, module in model.named_modules()}
    for unit in dict.fromkeys([*_layers(model), *model.pretrained().values()]):
        own = [name.startswith(f"{paths[unit]}.") for one in unit.parameters() for name in names[one]]
        if all(own):
            yield unit
    yield model


def _without_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Copy outputs of a unit that are views: writes into a view would bypass FSDP's hooks."""
    return tree_map_only(torch.Tensor, lambda one: one.clone() if one.requires_grad and is_view(one) else one, outputs)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost layers."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _layers(child)


def _without_memory(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Replace shards by whole parameters on the meta device; return the shards by name."""
    held: dict[str, torch.Tensor] = {}
    made: dict[int, nn.Parameter] = {}
    for slot in slots(model):
        if slot.kind is SlotKind.PARAMETER:
            part = slot.tensor
            held[slot.name] = part.detach()
            if id(part) not in made:
                empty = torch.empty(shapes[slot.name], dtype=part.dtype, device="meta")
                made[id(part)] = nn.Parameter(empty, requires_grad=part.requires_grad)
            put(slot, made[id(part)])
    return held


def _take_parts(model: nn.Module, held: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Give a sharded model on the meta device its shards back."""
    made: dict[int, nn.Parameter] = {}
    for slot in slots(model):
        if slot.kind is SlotKind.PARAMETER:
            empty = slot.tensor
            assert isinstance(empty, DTensor)
            assert empty.to_local().shape == held[slot.name].shape, slot.name
            if id(empty) not in made:
                part = DTensor.from_local(
                    held[slot.name], mesh, (_ROWS,), run_check=False, shape=empty.shape, stride=empty.stride()
                )
                made[id(empty)] = nn.Parameter(part, requires_grad=empty.requires_grad)
            put(slot, made[id(empty)])


@final
class FsdpLayout:
    """A process's shard of an FSDP model.

    Args:
        builder: What the shard was built with.
    """

    def __init__(self, builder: FsdpBuilder) -> None:
        self._builder = builder
        self._stream = RegionStream(builder.group.rank)
        self.group = builder.group

    def task_here(self, task: Task) -> Task:
        """Return the task itself: each process has all scores of its rows."""
        return task

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """Return this process's share of the rows, in as many passes as the largest share needs."""
        return portions(rows, micro_batch, rank=self.group.rank, size=self.group.size)

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Draw other random numbers on each process, a function of the state that all of them have."""
        return self._draw(device)

    @contextmanager
    def _draw(self, device: torch.device) -> Iterator[None]:
        self._stream.enter(device)
        try:
            yield
        finally:
            self._stream.leave_all()

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum over the processes."""
        return self.group.tensors.all_reduce(loss, "the loss")

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm over all shards, in the gradients' dtype."""
        gradients = [local_shard(one.grad) for one in model.parameters() if one.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        for one in gradients:
            wide = torch.promote_types(one.dtype, torch.float32)
            total += torch.linalg.vector_norm(one, dtype=wide).double().square()
        return self.group.tensors.all_reduce(total, "the gradients' norm").sqrt().to(gradients[0].dtype)

    def whole(self, model: TaskModel) -> TaskModel | None:
        """Return a copy on the CPU, gathered one tensor at a time."""
        return whole_model(model, self._builder.recipe, lambda _, tensor: _gathered(tensor), keep=self.group.rank == 0)

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Read this process's shards; nothing changes unless every tensor has its place."""
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
        parts = self._builder.parts(shapes)
        restore_slices(model, folder, parts, lambda _, tensor: tuple(tensor.shape), local_shard)

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Gather moments, and whatever else has a parameter's shape, on saving; shard them on loading."""
        order = [one for group in optimizer.param_groups for one in group["params"]]
        rank, size = self.group.rank, self.group.size

        def gathered(parameter: nn.Parameter, value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            whole = _gathered(value)
            return value if rank else whole.cpu()

        def sharded(parameter: nn.Parameter, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                return value
            assert isinstance(parameter, DTensor)
            part = StoredSlice(0, (share_of(len(value), rank, size),)).of(value).to(parameter.device)
            mesh, whole = parameter.device_mesh, parameter
            return DTensor.from_local(part, mesh, (_ROWS,), run_check=False, shape=whole.shape, stride=whole.stride())

        optimizer.register_state_dict_post_hook(lambda _, state: change_state(state, order, gathered))
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: _with_own_kernels(change_state(state, order, sharded), optimizer)
        )


def _with_own_kernels(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved state with this optimizer's choice of kernels: fused ones may not take shards."""
    groups: list[dict[str, Any]] = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, **{name: own[name] for name in ("fused", "foreach") if name in own}})
    return {**state, "param_groups": groups}


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
