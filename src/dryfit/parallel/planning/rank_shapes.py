"""Check by a second trace that a rank's shard of a model has the shapes that the plan says.

A size that the code has as a number does not shrink with the weights. Where it is an attribute of the module
(``num_heads``), the rank's module gets its own value; where it is not, the module would compute something else or fail,
and the axis stays whole. To find that out, a rank's module is traced at another batch size than the plan was made with,
and every tensor's shape is compared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch
from torch import nn

from dryfit.core.errors import ConfigError
from dryfit.core.sharding.shard_plan import ModuleShard, ParameterShard
from dryfit.meta.private_apis.torch_modules import parameters_of
from dryfit.parallel.planning.choose import Chosen
from dryfit.parallel.trace.capture import OTHER, CannotFollow, Inputs, follow
from dryfit.parallel.trace.graph import Graph, Node, Ref
from dryfit.parallel.trace.marks import numbers_of

_SIZED: Final = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "zeros",
        "ones",
        "empty",
        "full",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    ]
)
_PARTED: Final = frozenset({"split", "unsafe_split"})

Attributes = dict[str, dict[str, int]]
"""Integer attributes of modules on a rank, by path and name."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A place where a rank's module does not do what the plan says.

    Attributes:
        axes: The axes sharded there.
        text: What the module does instead.
    """

    axes: frozenset[int]
    text: str


def read_numbers(chosen: Chosen, other: Graph, degree: int, *, computed: bool) -> Attributes:
    """Return the attributes of modules that are sizes of sharded axes, with their values on a rank.

    Args:
        chosen: The sharded axes.
        other: The same forward pass at another batch size: integers that differ in it come from the inputs.
        degree: Number of ranks.
        computed: Whether to include attributes that a size was computed from, if they equal the axis's size.
    """
    made: Attributes = {}
    for node, again in zip(chosen.solved.graph.nodes, other.nodes, strict=True):
        numbers, moved = node.integers(), again.integers()
        for origin in node.origins:
            at = origin.position
            if at >= len(numbers) or numbers[at] != moved[at] or numbers[at] < 1:
                continue
            axis = _axis_sized(chosen, node, at)
            if axis is None:
                continue
            for module, name in origin.attributes:
                value = chosen.solved.graph.numbers.get(module, {}).get(name, 0)
                if value % degree == 0 and (origin.exact or (computed and value == chosen.solved.axes.size(axis))):
                    made.setdefault(module, {})[name] = value // degree
    return made


def _axis_sized(chosen: Chosen, node: Node, position: int) -> int | None:
    """Return the sharded axis in the dimension whose size an integer argument is."""
    ref = Ref(node.name)
    axes = chosen.solved.axes_of(ref)
    if node.op in _SIZED and position < len(axes):
        dim = axes[position]
    elif node.op in _PARTED and position == 0:
        dim = axes[node.integer("dim")]
    else:
        return None
    return next((axis for axis in dim if axis in chosen.cut), None)


def check_size(graph: Graph, other: Graph, module: nn.Module) -> None:
    """Refuse a model that runs other operators for other rows or lengths.

    Raises:
        ConfigError: It does.
    """
    for node, again in zip_longest(graph.nodes, other.nodes):
        if node is None or again is None or (node.op, node.module) != (again.op, again.module):
            break
    else:
        return
    problem = f"with more rows it runs {_named(again)} where it ran {_named(node)}"
    raise ConfigError(
        f"planning how {type(module).__name__} is cut",
        problem,
        "a model that does the same for any number of rows and any length",
        "train it without execution.tp",
    )


def misfits(
    module: nn.Module,
    inputs: Inputs | None,
    chosen: Chosen,
    other: Graph,
    tables: tuple[Mapping[str, ParameterShard], Mapping[str, ModuleShard], int],
) -> list[Misfit]:
    """Return the first place where a rank's shard has other shapes than the plan says; empty if there is none.

    Args:
        module: The whole module.
        inputs: Returns its inputs.
        chosen: The sharded axes.
        other: The whole module's forward pass, at the batch size that the shard is traced with.
        tables: The plan's parameters and modules, and its degree.
    """
    parameters, modules, degree = tables
    with one_rank(module, parameters, modules, degree):
        try:
            part = follow(module, inputs, OTHER, shards=modules, degree=degree)
        except CannotFollow as no:
            axes = _axes_in(chosen, no.module) or chosen.cut
            return [Misfit(axes, f"a rank's part of {no.module or 'the model'} does not run: {no.text}")]
    pairs = [(node, again) for node, again in zip(chosen.solved.graph.nodes, other.nodes, strict=True) if _acts(again)]
    for pair, found in zip_longest(pairs, filter(_acts, part.nodes)):
        if pair is None or found is None or found.op != pair[1].op:
            node = pair[0] if pair else chosen.solved.graph.nodes[-1]
            axes = _axes_in(chosen, node.module) or chosen.cut
            return [Misfit(axes, f"a rank's part runs {_named(found)} in the place of {_named(pair and pair[1])}")]
        node, whole = pair
        for item, value in enumerate(whole.outputs):
            ref = Ref(node.name, item)
            made = found.outputs[item] if item < len(found.outputs) else None
            if value and (made is None or made.shape != _local(chosen, ref, value.shape, degree)):
                axes = _axes_near(chosen, node) or chosen.cut
                return [
                    Misfit(
                        axes, _wrong_shape(node, made.shape if made else (), _local(chosen, ref, value.shape, degree))
                    )
                ]
    return []


def _acts(node: Node) -> bool:
    """Return whether torch keeps an operator in any case: it omits copies where the memory layout is right already."""
    return node.op not in ("contiguous", "clone")


def _named(node: Node | None) -> str:
    return f"{node.op} in {node.module or 'the model itself'}" if node else "nothing"


def _wrong_shape(node: Node, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return (
        f"{node.op} in {node.module or 'the model itself'} makes {list(found)} on a rank and should make "
        f"{list(expected)}: a size stands in its code that is no attribute of the module"
    )


def _local(chosen: Chosen, ref: Ref, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    cut = [any(axis in chosen.cut for axis in axes) for axes in chosen.solved.axes_of(ref)]
    return tuple(size // degree if is_cut else size for size, is_cut in zip(shape, cut, strict=True))


def _axes_in(chosen: Chosen, module: str) -> frozenset[int]:
    """Return the sharded axes in a module and those within it."""
    axes: set[int] = set()
    for node in chosen.solved.graph.nodes:
        if node.module == module or node.module.startswith(f"{module}."):
            axes.update(_axes_near(chosen, node))
    return frozenset(axes)


def _axes_near(chosen: Chosen, node: Node) -> frozenset[int]:
    """Return the sharded axes of an operator's tensors."""
    made = [Ref(node.name, item) for item, value in enumerate(node.outputs) if value]
    axes = {chosen.solved.cut_of(ref, chosen.cut) for ref in (*node.refs(), *made)}
    return frozenset(axis for axis in axes if axis is not None)


@contextmanager
def one_rank(
    module: nn.Module, parameters: Mapping[str, ParameterShard], modules: Mapping[str, ModuleShard], degree: int
) -> Iterator[None]:
    """Give a module the shapes of one rank's shard, without values, and put it back."""
    parts = dict(module.named_modules(remove_duplicate=False))
    held: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    numbers: list[tuple[nn.Module, str, int]] = []
    local: dict[int, nn.Parameter] = {}
    try:
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            shard = parameters[name]
            shard = parameters[shard.tied_to] if shard.tied_to else shard
            if id(parameter) not in local:
                empty = torch.empty(shard.local_shape(degree), dtype=parameter.dtype, device="meta")
                local[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            path, _, own = name.rpartition(".")
            held.append((parameters_of(parts[path]), own, parameter))
            parameters_of(parts[path])[own] = local[id(parameter)]
        for path, shard in modules.items():
            for name, value in shard.attributes.items():
                numbers.append((parts[path], name, numbers_of(parts[path]).get(name, value)))
                setattr(parts[path], name, value)
        yield
    finally:
        for table, own, parameter in held:
            table[own] = parameter
        for part, name, value in numbers:
            setattr(part, name, value)
