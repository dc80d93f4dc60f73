"""Copy a model for a proof: in double precision, with random weights, without layers that repeat others.

Weights are drawn larger than models begin with (a standard deviation of 0.5, less for large fans), so that no term of a
sum is lost beside the others, and no softmax is nearly flat: at the usual 0.02 a wrong head goes unnoticed.
"""

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dryfit.core.errors import LoadError, ShardError
from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.meta.construction.tape import is_deferred, tape_of
from dryfit.meta.construction.walk import Slot, slots
from dryfit.meta.inputs import allow_real_inputs
from dryfit.meta.private_apis.torch_modules import children_of
from dryfit.meta.private_apis.transformers_models import chooses_experts
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.trace.repeats import OF_EACH_KIND, kind_of, outermost_lists, renamed

_STD: Final = 0.5
_MOST_FAN: Final = 3.0
_THIN: Final = 8  # times longer than wide: a matrix of low rank
_SMALLER: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
_TO_SMALLER: Final = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class InDouble(TorchFunctionMode):
    """Computes everything in fp64, also where the model's code asks for a smaller type.

    Norms and softmaxes ask for fp32. Rounded there, results that differ in the last bit of fp64 may differ by a bit of
    fp32, which could not be told from a wrong plan.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TO_SMALLER:
            return args[0].double()
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _SMALLER else value


@dataclass(frozen=True, slots=True)
class StandIn:
    """A copy of a model to prove a plan with.

    Attributes:
        module: The copy, in fp64 with random weights, in eval mode.
        plan: The plan, by the copy's names.
        names: The original path of each module that has another path in the copy.
        left_out: Paths of the layers that the copy lacks.
    """

    module: nn.Module
    plan: ShardPlan
    names: Mapping[str, str]
    left_out: tuple[str, ...]

    def original(self, name: str) -> str:
        """Return the original name of a module or parameter of the copy."""
        return renamed(name, self.names)


def stand_in(module: nn.Module, plan: ShardPlan, *, seed: int, whole: bool) -> StandIn:
    """Copy a model with random weights.

    Args:
        module: The model, on the meta device or with weights, which are not read.
        plan: Its plan.
        seed: Of the weights.
        whole: Whether all layers are kept. Otherwise two of each kind are, in each outermost list of layers; layers of
            one kind have the same class, parameters, settings and rows of the plan.

    Raises:
        ShardError: A buffer has no value and cannot be computed.
    """
    dropped = _dropped(module, plan, whole)
    memo: dict[int, Any] = {key: nn.Module() for key in dropped}
    generator = torch.Generator().manual_seed(seed)
    kept_alive = _tensors(module, dropped, generator, memo)
    copied = copy.deepcopy(module, memo)
    del kept_alive
    allow_real_inputs(copied)
    for part in copied.modules():
        # Experts in one kernel (grouped_mm) know no fp64; one after the other they compute the same.
        if isinstance(part, PreTrainedModel) and chooses_experts(part):
            part.set_experts_implementation("eager")
    names = _close_gaps(module, copied, dropped)
    back = {old: new for new, old in names.items()}
    gone = tuple(path for path, layer in module.named_modules() if id(layer) in dropped)
    return StandIn(copied.eval(), _renamed(plan, back, gone), names, gone)


def kept_parameters(module: nn.Module, plan: ShardPlan, *, whole: bool) -> int:
    """Return the number of parameters of a copy, without making one."""
    without = _within(module, _dropped(module, plan, whole))
    kept = {
        id(parameter): parameter.numel()
        for part in module.modules()
        if id(part) not in without
        for parameter in part.parameters(recurse=False)
    }
    return sum(kept.values())


def _dropped(module: nn.Module, plan: ShardPlan, whole: bool) -> set[int]:
    """Return the ids of the layers that a copy lacks."""
    return set[int]() if whole else _repeated(module, plan)


def _within(module: nn.Module, dropped: set[int]) -> set[int]:
    """Return the ids of some layers and of all modules in them."""
    return {id(part) for layer in module.modules() if id(layer) in dropped for part in layer.modules()}


def _tensors(module: nn.Module, dropped: set[int], generator: torch.Generator, memo: dict[int, Any]) -> list[Any]:
    """Enter a replacement for every tensor into the memo of ``deepcopy``; return the slots to keep them alive."""
    places = slots(module)
    without = _within(module, dropped)
    for slot in places:
        old = slot.tensor
        if id(slot.owner) in without or id(old) in memo:
            continue
        if isinstance(old, nn.Parameter) and old.is_floating_point():
            memo[id(old)] = nn.Parameter(_drawn(slot, tuple(old.shape), generator))
            continue
        value = _computed(slot.name, old).detach()
        value = value.double() if value.is_floating_point() else value.clone()
        memo[id(old)] = nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value
    return places


def _drawn(slot: Slot, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) < 2:
        return drawn * _STD + (1.0 if slot.name.endswith("weight") else 0.0)  # a norm's
    short, long = sorted(shape[-2:])
    if isinstance(slot.owner, nn.Embedding) or short * _THIN > long:
        return drawn * min(_STD, _MOST_FAN / math.sqrt(max(math.sqrt(short * long), 1.0)))
    return drawn * min(
        _STD, 1 / math.sqrt(max(long, 1))
    )  # an adapter's: two of them stand beside one matrix, times a factor


def _computed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not is_deferred(tensor):
        return tensor
    tape = tape_of(tensor)
    try:
        if tape is not None:
            return tape.realise(tensor)[0]
        problem = "it is on meta, and how its constructor filled it is not known"
    except LoadError as error:
        problem = error.found
    raise ShardError("copying a model to prove a plan with", f"{name}: {problem}", hint="build it by dryfit.meta.build")


def _repeated(module: nn.Module, plan: ShardPlan) -> set[int]:
    """Return the ids of the layers after the first two of a kind, in outermost lists."""
    shards = shards_of(module, plan)
    repeated = set[int]()
    for path, layers in outermost_lists(module):
        seen = Counter[object]()
        for index, layer in enumerate(layers):
            kind = kind_of(layer), _rows(f"{path}.{index}" if path else str(index), layer, shards, plan)
            seen[kind] += 1
            if seen[kind] > OF_EACH_KIND:
                repeated.add(id(layer))
    return repeated


def _rows(path: str, layer: nn.Module, shards: Mapping[str, Any], plan: ShardPlan) -> object:
    """Return what the plan says of a layer's parameters and modules."""
    parameters = tuple(
        shards[f"{path}.{name}"].model_copy(update={"tied_to": None}).model_dump_json()
        for name, _ in layer.named_parameters()
    )
    modules = (plan.modules.get(f"{path}.{name}" if name else path) for name, _ in layer.named_modules())
    return parameters, tuple("" if what is None else what.model_dump_json() for what in modules)


def _close_gaps(module: nn.Module, copied: nn.Module, dropped: set[int]) -> dict[str, str]:
    """Remove the dropped layers from a copy's lists; return the old path of each moved layer, by its new one."""
    moved: dict[str, str] = {}
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or not any(id(layer) in dropped for layer in part):
            continue
        stays = [index for index, layer in enumerate(part) if id(layer) not in dropped]
        layers = copied.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        kept = [layers[index] for index in stays]
        children_of(layers).clear()
        layers.extend(kept)
        moved |= {f"{path}.{new}": f"{path}.{old}" for new, old in enumerate(stays) if new != old}
    return moved


def _renamed(plan: ShardPlan, back: Mapping[str, str], gone: tuple[str, ...]) -> ShardPlan:
    def kept(name: str) -> bool:
        return not any(name == path or name.startswith(f"{path}.") for path in gone)

    return ShardPlan(
        degree=plan.degree,
        parameters={renamed(name, back): shard for name, shard in plan.parameters.items() if kept(name)},
        modules={renamed(name, back): what for name, what in plan.modules.items() if kept(name)},
        scores=plan.scores and renamed(plan.scores, back),
    )
