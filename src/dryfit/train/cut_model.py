"""A trial's model cut over the processes that train it: built from slices, saved whole."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.load_report import LoadReport
from dryfit.core.settings import ModelSettings, RegularizationSettings
from dryfit.core.sharding import ParameterShard, ShardPlan
from dryfit.core.words import few
from dryfit.meta.adapters import adapter_state
from dryfit.meta.checkpoint import open_checkpoint
from dryfit.meta.filling import fill, unwrapped
from dryfit.meta.matching import Wishes, memory_of
from dryfit.meta.parts import Part
from dryfit.meta.pretrained import Kind, empty_stack, fill_pretrained
from dryfit.meta.reading import CheckpointReader, ReadMode
from dryfit.meta.tape import is_deferred
from dryfit.meta.walk import put, slots
from dryfit.parallel.apply import connect, mark_cut, part_of
from dryfit.parallel.check import shards_of
from dryfit.parallel.gathering import gather
from dryfit.parallel.norms import gradient_norm
from dryfit.tasks.base import MakeBase, TaskModel
from dryfit.tasks.load import weights_file
from dryfit.train.ranks import Group

Build = Callable[[MakeBase], TaskModel]
"""From what makes pretrained models to the trial's."""


def empty_model(build: Build, regularization: RegularizationSettings) -> TaskModel:
    """The trial's model without memory."""
    return build(lambda source, kind, part="", dtype=None: _empty(source, kind, dtype, regularization))


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a rank's model is made.

    Attributes:
        build: Makes the trial's model from pretrained ones.
        regularization: Its dropouts.
        plan: How it is cut.
        group: This rank among the others.
        device: Where it lies.
    """

    build: Build
    regularization: RegularizationSettings
    plan: ShardPlan
    group: Group
    device: str

    def filled(self) -> tuple[TaskModel, LoadReport]:
        """This rank's slices of the model: pretrained ones read from their files, the others drawn whole and cut.

        It does not compute with the other ranks yet: see :meth:`connected`.

        Raises:
            LoadError: As for a whole model.
            ConfigError: A part cannot be cut before it is filled.
        """
        whole = empty_model(self.build, self.regularization)
        parts = self.parts(whole)
        model = self.build(self._slices_of(whole, parts))
        left = {name for name, one in model.named_parameters(remove_duplicate=False) if is_deferred(one)}
        _refuse_other_shapes(model, left, self.plan)
        wishes = Wishes(torch.device(self.device), missing=model.drawn)
        report = fill(model, None, replace(wishes, parts={name: parts[name] for name in left & parts.keys()}))
        mark_cut(model, self.group.rank, self.plan.degree)
        return model, report

    def connected(self, model: TaskModel) -> "CutModel":
        """Make the ranks' models compute together; it must be known which parameters are trained."""
        connect(model, self.plan, self.group.tensors)
        return CutModel(self)

    def parts(self, whole: nn.Module) -> dict[str, Part]:
        """What this rank holds, by every name of each parameter that is cut."""
        return {
            name: part
            for name, shard in shards_of(whole, self.plan).items()
            if (part := part_of(shard, self.group.rank, self.plan.degree)) is not None
        }

    def _slices_of(self, whole: TaskModel, parts: Mapping[str, Part]) -> MakeBase:
        """Makes pretrained models that hold slices."""

        def make(
            source: ModelSettings, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None
        ) -> PreTrainedModel:
            model = _empty(source, kind, dtype, self.regularization)
            base = whole.pretrained()[part]
            prefix = next(f"{path}." for path, one in whole.named_modules() if one is base)
            own = {unwrapped(name.removeprefix(prefix)): one for name, one in parts.items() if name.startswith(prefix)}
            fill_pretrained(model, source, kind, Wishes(torch.device(self.device), dtype, parts=own))
            return model

        return make


def _empty(
    source: ModelSettings, kind: Kind, dtype: torch.dtype | None, regularization: RegularizationSettings
) -> PreTrainedModel:
    if dtype is torch.int8:
        raise ConfigError(
            "cutting a trial's model over processes",
            'lora.base is "int8"',
            "fp32, fp16 or bf16",
            "leave execution.tp out",
        )
    return empty_stack(source, kind, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)


def _refuse_other_shapes(model: nn.Module, names: set[str], plan: ShardPlan) -> None:
    """Refuse what was made for slices where the plan cuts what is made for the whole."""
    shards = shards_of(model, plan)
    wrong = [name for name in sorted(names) if tuple(model.get_parameter(name).shape) != shards[name].shape]
    if wrong:
        raise ConfigError(
            "cutting a trial's model over processes",
            f"what is put on its layers has the shape of slices: {few(wrong)}",
            allowed="adapters on linear layers",
            hint="leave execution.tp out",
        )


@final
class CutModel:
    """A rank's part of a cut model that computes with the others.

    Args:
        cutting: How it was made.
    """

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self.company = cutting.group

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Of all slices, in the gradients' own number format."""
        norm = gradient_norm(model, self._cutting.plan, self.company.tensors)
        return norm.to(next(one.grad.dtype for one in model.parameters() if one.grad is not None))

    def whole(self, model: TaskModel) -> TaskModel | None:
        """A model of its own on the CPU, put together one tensor at a time."""
        state = self._whole_state(model)
        if self.company.rank:
            return None
        whole = empty_model(self._cutting.build, self._cutting.regularization)
        made: dict[int, torch.Tensor] = {}
        for slot in slots(whole):
            tensor = state.get(slot.name)
            if tensor is not None:
                if id(slot.tensor) not in made:
                    made[id(slot.tensor)] = _as(slot.tensor, tensor)
                put(slot, made[id(slot.tensor)])
        return whole

    def _whole_state(self, model: TaskModel) -> dict[str, torch.Tensor]:
        """What is saved of the model, on the CPU; empty on other ranks than the first."""
        shards = shards_of(model, self._cutting.plan)
        state: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for name, local in _saved(model):
            if id(local) not in made:
                whole = local.detach()
                if name in shards:
                    whole = gather(whole, shards[name], self.company.tensors, name)
                made[id(local)] = local if self.company.rank else whole.to("cpu", copy=True)
            if not self.company.rank:
                state[name] = made[id(local)]
        return state

    def restore(self, model: TaskModel, folder: Path) -> None:
        """Each rank reads its slices; nothing changes unless every tensor has its place."""
        stored = open_checkpoint(folder / weights_file(model))
        shards, parts = shards_of(model, self._cutting.plan), self._cutting.parts(model)
        names = {memory_of(tensor): name for name, tensor in model.state_dict().items()}
        adapted = model.adapted()
        places = model.state_dict() if adapted is None else adapter_state(adapted)
        name_of = {key: names[memory_of(tensor)] for key, tensor in places.items()}
        given = {name_of[key] for key in stored.tensors if key in places}
        wrong = [f"{key} has no place" for key in stored.tensors if key not in places]
        wrong += [f"{key} is missing" for key in places if name_of[key] not in given]
        for key in stored.tensors.keys() & places.keys():
            name, found = name_of[key], tuple(stored.tensors[key].shape)
            shape = shards[name].shape if name in shards else tuple(places[key].shape)
            wrong += [f"{key}: {list(found)} in the file, not {list(shape)}"] if found != shape else []
        if wrong:
            raise LoadError(f"restoring a cut model from {folder}", few(wrong), allowed="what was saved of this model")
        wanted = {key: parts[name_of[key]] for key in stored.tensors if name_of[key] in parts}
        with CheckpointReader(stored, ReadMode.PRIVATE) as reader, torch.no_grad():
            for key, tensor in reader.tensors(stored.tensors, wanted):
                places[key].copy_(tensor)

    def save_whole_state(self, model: TaskModel, optimizer: torch.optim.Optimizer) -> None:
        """Moments and all else that has a parameter's shape are put together when saved, and cut when loaded."""
        shards = shards_of(model, self._cutting.plan)
        by_id = {id(parameter): shards[name] for name, parameter in model.named_parameters()}
        order = [by_id[id(one)] for group in optimizer.param_groups for one in group["params"]]
        degree, company = self._cutting.plan.degree, self.company

        def gathered(shard: ParameterShard, value: Any) -> Any:
            if not _is_of(value, shard.local_shape(degree), shard):
                return value
            whole = gather(value, shard, company.tensors, "the optimizer's state")
            return value if company.rank else whole.cpu()

        def cut(shard: ParameterShard, value: Any) -> Any:
            part = part_of(shard, company.rank, degree)
            return part.of(value) if part is not None and _is_of(value, shard.shape, shard) else value

        optimizer.register_state_dict_post_hook(lambda _, state: _each(state, order, gathered))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: _each(state, order, cut))


def _saved(model: TaskModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model that are saved, by name: of one with adapters these alone."""
    adapted = model.adapted()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if adapted is None or any(fnmatchcase(name, pattern) for pattern in model.drawn):
            yield name, tensor


def _as(old: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _is_of(value: Any, shape: tuple[int, ...], shard: ParameterShard) -> bool:
    """Whether something in an optimizer's state goes element by element with a parameter that is cut."""
    return shard.dim is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == shape


def _each(
    state: dict[str, Any], order: list[ParameterShard], change: Callable[[ParameterShard, Any], Any]
) -> dict[str, Any]:
    changed = {
        index: {name: change(order[index], value) for name, value in sorted(values.items())}
        for index, values in sorted(state["state"].items())
    }
    return {**state, "state": changed}
