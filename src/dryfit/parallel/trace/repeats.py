"""Shorten lists of repeated layers for a trace, and extend the plan of the kept ones to all layers.

Layers are of one kind if their classes, settings and shapes of parameters and buffers are the same, but for the layer's
index. The front of a list is kept until it holds two layers of each kind: the first may be special by its place, those
after the second are not.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from torch import nn

from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.meta.private_apis.torch_modules import children_of, replace_children

OF_EACH_KIND: Final = 2
"""Layers of a kind that stand for all of them."""
_WHICH_LAYER: Final = frozenset(
    {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx", "training"}
)


@contextmanager
def shortened(module: nn.Module) -> Iterator[dict[str, str]]:
    """Remove the layers of a module that repeat others, and put them back.

    Yields:
        The kept layer that stands for each removed one, by path.
    """
    stands_for: dict[str, str] = {}
    held: list[tuple[nn.ModuleList, dict[str, nn.Module | None]]] = []
    for path, layers in outermost_lists(module):
        kept, like = _split(layers)
        if len(kept) < len(layers) and not _shares_parameters(module, list(layers)[len(kept) :]):
            dot = f"{path}." if path else ""
            stands_for |= {f"{dot}{out}": f"{dot}{one}" for out, one in like.items()}
            every = children_of(layers)
            held.append((layers, every))
            replace_children(layers, {name: every[name] for name in kept})
    try:
        yield stands_for
    finally:
        for layers, every in held:
            replace_children(layers, every)


def outermost_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of layers by path; not those within a layer, such as experts, whose number the layer knows."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((path, part))
    return lists


def _split(layers: nn.ModuleList) -> tuple[list[str], dict[str, str]]:
    """Return the names of the kept layers, and for each other layer a kept one of its kind."""
    kinds = {name: kind_of(layer) for name, layer in layers.named_children()}
    wanted = {kind: min(OF_EACH_KIND, list(kinds.values()).count(kind)) for kind in kinds.values()}
    kept: list[str] = []
    latest: dict[object, str] = {}
    for name, kind in kinds.items():
        if not any(wanted.values()):
            break
        kept.append(name)
        latest[kind] = name
        wanted[kind] = max(0, wanted[kind] - 1)
    return kept, {name: latest[kind] for name, kind in kinds.items() if name not in kept}


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Return the key that layers of one kind share."""
    return tuple(
        (
            path,
            type(part),
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in part.named_parameters(recurse=False)),
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in part.named_buffers(recurse=False)),
            tuple(
                (name, value)
                for name, value in sorted(vars(part).items())
                if isinstance(value, int | float | str) and name not in _WHICH_LAYER
            ),
        )
        for path, part in layer.named_modules()
    )


def _shares_parameters(module: nn.Module, layers: list[nn.Module]) -> bool:
    """Return whether some layers share parameters with each other or with the rest of the module."""
    inside = [id(parameter) for layer in layers for _, parameter in layer.named_parameters(remove_duplicate=False)]
    every = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    return len(set(inside)) < len(inside) or any(every.count(key) > 1 for key in set(inside))


def for_all_layers(plan: ShardPlan, module: nn.Module, stands_for: Mapping[str, str]) -> ShardPlan:
    """Extend the plan of a shortened module to the whole module.

    Args:
        plan: The shortened module's.
        module: The whole module.
        stands_for: The kept layer that stood for each removed one.
    """
    parameters: dict[str, ParameterShard] = {}
    whole: dict[str, str] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        one = renamed(name, stands_for)
        parameters[name] = plan.parameters[one]
        if one in plan.whole:
            whole[name] = plan.whole[one]
    modules = {
        path: plan.modules[one]
        for path, _ in module.named_modules(remove_duplicate=False)
        if (one := renamed(path, stands_for)) in plan.modules
    }
    return plan.model_copy(update={"parameters": parameters, "modules": modules, "whole": whole})


def renamed(name: str, new_of: Mapping[str, str]) -> str:
    """Return the name of a module or parameter after some modules have got other paths.

    Args:
        name: Its name before.
        new_of: The new path, by the old one.
    """
    for old, new in new_of.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name
