"""Sharded data parallelism (torch's FSDP2), and a rank's shard of a trial's model by either kind."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from dryfit.gpu.private_apis.torch_modes import MODES, tree_map_only
from dryfit.gpu.private_apis.torch_tensors import TENSORS, is_view
from dryfit.gpu.slots import Slot, SlotKind, put_all
from dryfit.meta.keys import StoredSlice
from dryfit.parallel.collectives import RegionStream, agree
from dryfit.parallel.layout import (
    Gathered,
    Layout,
    ModelRecipe,
    Portion,
    Sharded,
    ShardedLayout,
    empty_model,
    filled_slices,
    local_shard,
    portions,
    restore_slices,
)
from dryfit.parallel.processes import ProcessGroup, RankGroup
from dryfit.parallel.proved_plans import PLANS_FOLDER, proved_plan
from dryfit.parallel.tensor_parallel import TensorParallelLayout
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.private_names import require
from dryfit.settings.text import few
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.heads import freeze

# Bytes of weights, gradients and optimizer state that a process of an FSDP model holds.


def share_of(size: int, rank: int, processes: int) -> tuple[int, int]:
    """Return begin and end of a process's rows, split as by ``torch.chunk``: the last processes may have none."""
    most = -(-size // processes)
    begin = min(rank * most, size)
    return begin, min(begin + most, size)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that one process holds between two steps.

    Attributes:
        weights_bytes: Shards of parameters, each padded to the longest shard.
        gradients_bytes: Shards of gradients, after a backward pass.
        state_bytes: The optimizer's state, without step counts.
    """

    weights_bytes: int
    gradients_bytes: int
    state_bytes: int


def held_bytes(parameters: Iterable[nn.Parameter], *, rank: int, processes: int, moments: int) -> HeldBytes:
    """Return the bytes that a process holds between two steps.

    torch pads weights and gradients to equal shards (``FSDPParam.padded_sharded_param_size``), optimizer state not.

    Args:
        parameters: All of the model's, tied ones once; they may be on the meta device.
        rank: Number of the process.
        processes: Number of processes.
        moments: Tensors of a parameter's shape and type that the optimizer keeps for it.
    """
    weights = gradients = state = 0
    for one in parameters:
        row_bytes = math.prod(one.shape[1:]) * one.itemsize
        padded = -(-one.shape[0] // processes) * row_bytes
        weights += padded
        if one.requires_grad:
            begin, end = share_of(one.shape[0], rank, processes)
            gradients += padded
            state += moments * (end - begin) * row_bytes
    return HeldBytes(weights, gradients, state)


# Sharded data parallelism (torch's FSDP2): weights, gradients and optimizer state sharded over the processes.
#
# Each process holds a shard of every parameter, along the first dimension, and computes a share of each batch's rows.
# A layer's weights are gathered before it computes and freed afterwards. Its gradients are summed over the processes,
# and each keeps its shard of the sum.


_ROWS: Final = Shard(0)
_SHARDING: Final = "sharding a trial's model over processes"


def _shapes_of(whole: nn.Module) -> dict[str, tuple[int, ...]]:
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

    def whole(slot: Slot) -> torch.Tensor | None:
        if slot.kind is not SlotKind.PARAMETER:
            return None
        return torch.empty(shapes[slot.name], dtype=slot.tensor.dtype, device="meta")

    return {slot.name: slot.tensor.detach() for slot, _ in put_all(model, whole)}


def _take_parts(model: nn.Module, held: Mapping[str, torch.Tensor]) -> None:
    """Give a sharded model on the meta device its shards back."""

    def part(slot: Slot) -> torch.Tensor | None:
        if not isinstance(slot.tensor, DTensor):
            return None
        assert slot.tensor.to_local().shape == held[slot.name].shape, slot.name
        return _shard_like(slot.tensor, held[slot.name])

    put_all(model, part)


def _shard_like(whole: DTensor, part: torch.Tensor) -> DTensor:
    """Return a tensor that is sharded as another one, of which this process holds a part."""
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(part, whole.device_mesh, (_ROWS,), run_check=False, shape=shape, stride=stride)


@final
class FsdpLayout(ShardedLayout):
    """A process's shard of an FSDP model.

    Args:
        recipe: How the model is made.
        group: This process among the others.
    """

    def __init__(self, recipe: ModelRecipe, group: RankGroup) -> None:
        super().__init__(recipe, group)
        self._stream = RegionStream(group.rank)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def load(self, whole: TaskModel) -> tuple[TaskModel, LoadReport]:
        """Load this process's shard of each parameter; :meth:`connect` makes them compute with the others.

        Args:
            whole: The whole model, on the meta device.

        Raises:
            LoadError: As for a whole model.
            ConfigError: A parameter cannot be sharded.
        """
        self._shapes = _shapes_of(whole)
        scalars = [name for name, shape in self._shapes.items() if not shape]
        if scalars:
            problem = f"parameters that are a single number: {few(scalars)}"
            raise ConfigError(_SHARDING, problem, allowed="vectors and matrices")
        return filled_slices(self.recipe, whole, self._parts(self._shapes))

    def _parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredSlice]:
        """Return this process's slice of each parameter, given the whole shapes."""
        return {name: self._part(shape[0]) for name, shape in shapes.items()}

    def _part(self, rows: int) -> StoredSlice:
        return StoredSlice(0, (share_of(rows, self.group.rank, self.group.size),))

    def connect(self, model: TaskModel) -> None:
        """Make the processes' models compute together; called once it is known which parameters are trained.

        Raises:
            ShardError: The processes have different parameters.
        """
        require(_SHARDING, MODES, TENSORS)
        agree(self.group.tensors, {"the parameters": _described(model, self._shapes)})
        mesh = init_device_mesh(self.recipe.device, (self.group.size,))
        held = _without_memory(model, self._shapes)
        units = list(_units(model))  # before parameters are replaced
        for unit in units:
            unit.register_forward_hook(_without_views)
            sharded = cast("FSDPModule", fully_shard(unit, mesh=mesh, reshard_after_forward=True))
            # The loss was divided by the whole batch's weight already. gloo has no sum of products, so plain sums.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        _take_parts(model, held)
        for unit in units:
            # The memory for gathered weights is made on first use: made in inference mode, it could not be trained.
            sharded = cast("FSDPModule", unit)
            sharded.unshard()
            sharded.reshard()

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

    def gathered(self, model: TaskModel) -> Gathered:
        """Return what gathers a tensor's shards from all processes."""
        return lambda _, tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def sharded(self, model: TaskModel) -> Sharded:
        """Return what shards a whole tensor of a parameter's shape."""
        parameters = dict(model.named_parameters())

        def shard(name: str, value: torch.Tensor) -> torch.Tensor:
            whole = parameters[name]
            if value.shape != whole.shape:
                return value
            assert isinstance(whole, DTensor)
            return _shard_like(whole, self._part(len(value)).of(value).to(whole.device))

        return shard

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Read this process's shards; nothing changes unless every tensor has its place."""
        restore_slices(model, folder, self._parts(_shapes_of(model)), {})

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """As of every sharded layout; on loading, fused kernels that may not take shards are not taken over."""
        super().save_whole_state(model, optimizer)
        optimizer.register_load_state_dict_pre_hook(lambda _, state: _with_own_kernels(state, optimizer))


def _with_own_kernels(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved state with this optimizer's choice of kernels: fused ones may not take shards."""
    groups: list[dict[str, Any]] = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, **{name: own[name] for name in ("fused", "foreach") if name in own}})
    return {**state, "param_groups": groups}


# Build a rank's shard of a trial's model by tensor parallelism or FSDP, according to the execution plan.


def sharded_model(
    recipe: ModelRecipe, task: Task, group: ProcessGroup, plan: ExecutionPlan, cache_dir: Path
) -> tuple[TaskModel, LoadReport, Layout]:
    """Build this rank's shard, ready to train with the others.

    Args:
        recipe: How the model is made.
        task: Whose model it is.
        group: The processes, several of them.
        plan: Says how many there are, and whether they share tensors or rows.
        cache_dir: Keeps proved shard plans.

    Raises:
        ConfigError: The model cannot be sharded so.
        ShardError: The shard plan is wrong, or the ranks are not alike.
    """
    assert isinstance(group, RankGroup)
    whole = empty_model(recipe)
    if plan.dp > 1:
        layout = FsdpLayout(recipe, group)
    else:
        folder = cache_dir / PLANS_FOLDER
        # Rank 0 plans and proves, for all.
        shards = group.share(proved_plan(whole, task, group.size, folder).plan if group.rank == 0 else None)
        assert shards is not None
        layout = TensorParallelLayout(recipe, shards, group)
    model, report = layout.load(whole)
    freeze(model, recipe.regularization.freeze_layers, dropout=recipe.regularization.frozen_dropout)
    layout.connect(model)
    return model, report, layout
