"""A trial's model whose weights, gradients and optimizer state are divided among its processes (torch's FSDP2).

Each process has a part of every parameter, along its first dimension, and a share of each batch's rows. Before a layer
computes its weights are put together, afterwards they are let go; its gradients are summed over the processes, and each
keeps its part of the sum.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
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
from dryfit.core.settings.tables import RegularizationSettings
from dryfit.core.text.words import few
from dryfit.meta.construction.walk import SlotKind, put, slots
from dryfit.meta.files.stored_slices import StoredSlice
from dryfit.meta.private_apis.torch_modes import MODES, tree_map_only
from dryfit.meta.private_apis.torch_tensors import TENSORS, is_view
from dryfit.parallel.layout.fsdp_bytes import share_of
from dryfit.parallel.layout.model_slices import (
    Build,
    change_state,
    empty_model,
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


@dataclass(frozen=True, slots=True)
class FsdpBuilder:
    """How a process's part of the model is made.

    Attributes:
        build: Makes the trial's model from pretrained ones.
        regularization: Its dropouts.
        whole: It, without memory.
        group: This process among the others.
        device: Where it lies.
    """

    build: Build
    regularization: RegularizationSettings
    whole: TaskModel
    group: RankGroup
    device: str

    def filled(self) -> tuple[TaskModel, LoadReport]:
        """This process's part of each parameter, read or drawn as that of a model that is cut.

        Raises:
            LoadError: As for a whole model.
            ConfigError: It cannot be divided.
        """
        shapes = shapes_of(self.whole)
        scalars = [name for name, shape in shapes.items() if not shape]
        if scalars:
            found = f"parameters that are a single number: {few(scalars)}"
            raise ConfigError("dividing a trial's model among processes", found, allowed="vectors and matrices")
        return filled_slices(self.build, self.whole, self.parts(shapes), self.regularization, self.device)

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredSlice]:
        """What is here of parameters of these shapes."""
        return {
            name: StoredSlice(0, (share_of(shape[0], self.group.rank, self.group.size),))
            for name, shape in shapes.items()
        }

    def connected(self, model: TaskModel) -> "FsdpLayout":
        """Make the processes' models compute together; it must be known which parameters are trained."""
        require("dividing a trial's model among processes", MODES, TENSORS)
        shapes = shapes_of(self.whole)
        agree(self.group.tensors, {"the parameters": _described(model, shapes)})
        mesh = init_device_mesh(self.device, (self.group.size,))
        held = _without_memory(model, shapes)
        units = list(_units(model))  # before parameters are replaced
        for unit in units:
            unit.register_forward_hook(_without_views)
            divided = cast("FSDPModule", fully_shard(unit, mesh=mesh, reshard_after_forward=True))
            # The loss was divided by the whole batch's weight already. gloo has no sum of products, so plain sums.
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(True)
        _take_parts(model, held, mesh)
        for unit in units:
            # What they are put together in is made on first use: made in inference mode, it could not be trained.
            divided = cast("FSDPModule", unit)
            divided.unshard()
            divided.reshard()
        return FsdpLayout(self)


def shapes_of(whole: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a model that is not divided, by all its names."""
    return {name: tuple(one.shape) for name, one in whole.named_parameters(remove_duplicate=False)}


def _described(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    named = model.named_parameters(remove_duplicate=False)
    return "\n".join(f"{name} {shapes[name]} {one.dtype} {one.requires_grad}" for name, one in named)


def _units(model: TaskModel) -> Iterator[nn.Module]:
    """Modules whose weights are put together at once, inner ones first.

    Layers are what transformers itself recomputes one by one. The pretrained models are units of their own, since they
    are called without the head where they generate. A module that shares weights with what is outside it is none.
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
    """Copy what of a unit's outputs is a view: what is written into one would pass over the hooks of FSDP."""
    return tree_map_only(torch.Tensor, lambda one: one.clone() if one.requires_grad and is_view(one) else one, outputs)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost layers."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _layers(child)


def _without_memory(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Put whole parameters on meta into the places of parts, which are returned by their names."""
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
    """Give a divided model on meta its parts."""
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
    """A process's part of a divided model that computes with the others.

    Args:
        dividing: How it was made.
    """

    def __init__(self, dividing: FsdpBuilder) -> None:
        self._dividing = dividing
        self._stream = RegionStream(dividing.group.rank)
        self.group = dividing.group

    def task_here(self, task: Task) -> Task:
        """The task itself: each process has all scores of its rows."""
        return task

    def portions(self, rows: int, micro_batch: int) -> tuple[Portion, ...]:
        """This process's share of the rows, in as many passes as the largest share needs."""
        return portions(rows, micro_batch, rank=self.group.rank, size=self.group.size)

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Other random numbers on each process; a function of the state that all of them have."""
        return self._draw(device)

    @contextmanager
    def _draw(self, device: torch.device) -> Iterator[None]:
        self._stream.enter(device)
        try:
            yield
        finally:
            self._stream.leave_all()

    def batch_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum of what the processes have computed."""
        return self.group.tensors.all_reduce(loss, "the loss")

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Of all parts, in the gradients' own number format."""
        gradients = [part_here(one.grad) for one in model.parameters() if one.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        for one in gradients:
            wide = torch.promote_types(one.dtype, torch.float32)
            total += torch.linalg.vector_norm(one, dtype=wide).double().square()
        return self.group.tensors.all_reduce(total, "the gradients' norm").sqrt().to(gradients[0].dtype)

    def whole(self, model: TaskModel) -> TaskModel | None:
        """A model of its own on the CPU, put together one tensor at a time."""
        making = self._dividing
        empty = partial(empty_model, making.build, making.regularization)
        return whole_model(model, empty, lambda _, tensor: _put_together(tensor), keep=self.group.rank == 0)

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Each process reads its parts; nothing changes unless every tensor has its place."""
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
        parts = self._dividing.parts(shapes)
        restore_slices(model, folder, parts, lambda _, tensor: tuple(tensor.shape), part_here)

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Moments and all else that has a parameter's shape are put together when saved, and divided when loaded."""
        order = [one for group in optimizer.param_groups for one in group["params"]]
        rank, size = self.group.rank, self.group.size

        def gathered(parameter: nn.Parameter, value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            whole = _put_together(value)
            return value if rank else whole.cpu()

        def divided(parameter: nn.Parameter, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                return value
            assert isinstance(parameter, DTensor)
            part = StoredSlice(0, (share_of(len(value), rank, size),)).of(value).to(parameter.device)
            mesh, whole = parameter.device_mesh, parameter
            return DTensor.from_local(part, mesh, (_ROWS,), run_check=False, shape=whole.shape, stride=whole.stride())

        optimizer.register_state_dict_post_hook(lambda _, state: change_state(state, order, gathered))
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: _with_own_work(change_state(state, order, divided), optimizer)
        )


def _with_own_work(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A saved state whose arithmetic is done as this optimizer does it: fused kernels may not take parts."""
    groups: list[dict[str, Any]] = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, **{name: own[name] for name in ("fused", "foreach") if name in own}})
    return {**state, "param_groups": groups}


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _put_together(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
