"""Check by a second trace that a rank's shard of a model has the shapes of the plan.

A size that the code has as a number does not shrink with the weights. Where it is an attribute of the module
(``num_heads``), the rank's module gets its own value; where it is not, the module would compute something else or fail,
and the axis stays whole. To find that out, a rank's module is traced at another batch size than the plan was made with,
and every tensor's shape is compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch
from torch import nn

from dryfit.core.errors import ConfigError
from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.meta.construction.walk import Slot, SlotKind, replaced
from dryfit.parallel.planning.choose import ShardedAxes
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.trace.capture import OTHER, CannotFollow, Inputs, follow
from dryfit.parallel.trace.graph import Graph, Node, Ref
from dryfit.parallel.trace.marks import numbers_of

_CREATING: Final = frozenset(prefix + name for prefix in ("", "new_") for name in ("zeros", "ones", "empty", "full"))
_SIZED: Final = _CREATING | {"view", "reshape", "_unsafe_view", "expand"}
_PARTED: Final = frozenset({"split", "unsafe_split"})

Attributes = dict[str, dict[str, int]]
"""Integer attributes of modules on a rank, by path and name."""


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """A place where a rank's module differs from the plan.

    Attributes:
        axes: The axes sharded there.
        text: What the module does instead.
    """

    axes: frozenset[int]
    text: str


def read_numbers(chosen: ShardedAxes, other: Graph, degree: int, *, computed: bool) -> Attributes:
    """Return the attributes of modules that are sizes of sharded axes, with their values on a rank.

    Args:
        chosen: The sharded axes.
        other: The same forward pass at another batch size: integers that differ in it come from the inputs.
        degree: Number of ranks.
        computed: Whether to include attributes that a size was computed from, if they equal the axis's size.
    """
    made: Attributes = {}
    for node, again in zip(chosen.traced.graph.nodes, other.nodes, strict=True):
        numbers, moved = node.integers(), again.integers()
        for origin in node.origins:
            at = origin.position
            if at >= len(numbers) or numbers[at] != moved[at] or numbers[at] < 1:
                continue
            axis = _axis_sized(chosen, node, at)
            if axis is None:
                continue
            for module, name in origin.attributes:
                value = chosen.traced.graph.numbers.get(module, {}).get(name, 0)
                if value % degree == 0 and (origin.exact or (computed and value == chosen.traced.axes.size(axis))):
                    made.setdefault(module, {})[name] = value // degree
    return made


def _axis_sized(chosen: ShardedAxes, node: Node, position: int) -> int | None:
    """Return the sharded axis in the dimension whose size an integer argument is."""
    ref = Ref(node.name)
    axes = chosen.traced.axes_of(ref)
    if node.op in _SIZED and position < len(axes):
        dim = axes[position]
    elif node.op in _PARTED and position == 0:
        dim = axes[node.integer("dim")]
    else:
        return None
    return next((axis for axis in dim if axis in chosen.axes), None)


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
        f"planning how {type(module).__name__} is sharded",
        problem,
        "a model that does the same for any number of rows and any length",
        "train it without execution.tp",
    )


def shape_mismatches(
    module: nn.Module,
    inputs: Inputs | None,
    chosen: ShardedAxes,
    other: Graph,
    plan: ShardPlan,
) -> list[ShapeMismatch]:
    """Return the first place where a rank's shard has other shapes than the plan; empty if there is none.

    Args:
        module: The whole module.
        inputs: Returns its inputs.
        chosen: The sharded axes.
        other: The whole module's forward pass, at the batch size that the shard is traced with.
        plan: The plan.
    """
    degree = plan.degree
    with one_rank(module, plan):
        try:
            part = follow(module, inputs, OTHER, shards=plan.modules, degree=degree)
        except CannotFollow as no:
            axes = _axes_in(chosen, no.module) or chosen.axes
            return [ShapeMismatch(axes, f"a rank's part of {no.module or 'the model'} does not run: {no.text}")]
    pairs = [(node, again) for node, again in zip(chosen.traced.graph.nodes, other.nodes, strict=True) if _acts(again)]
    for pair, found in zip_longest(pairs, filter(_acts, part.nodes)):
        if pair is None or found is None or found.op != pair[1].op:
            node = pair[0] if pair else chosen.traced.graph.nodes[-1]
            axes = _axes_in(chosen, node.module) or chosen.axes
            return [
                ShapeMismatch(axes, f"a rank's part runs {_named(found)} in the place of {_named(pair and pair[1])}")
            ]
        node, whole = pair
        for item, value in enumerate(whole.outputs):
            ref = Ref(node.name, item)
            made = found.outputs[item] if item < len(found.outputs) else None
            if value and (made is None or made.shape != _local(chosen, ref, value.shape, degree)):
                axes = _axes_near(chosen, node) or chosen.axes
                return [
                    ShapeMismatch(
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


def _local(chosen: ShardedAxes, ref: Ref, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    sharded = [any(axis in chosen.axes for axis in axes) for axes in chosen.traced.axes_of(ref)]
    return tuple(size // degree if is_sharded else size for size, is_sharded in zip(shape, sharded, strict=True))


def _axes_in(chosen: ShardedAxes, module: str) -> frozenset[int]:
    """Return the sharded axes in a module and those within it."""
    axes: set[int] = set()
    for node in chosen.traced.graph.nodes:
        if node.module == module or node.module.startswith(f"{module}."):
            axes.update(_axes_near(chosen, node))
    return frozenset(axes)


def _axes_near(chosen: ShardedAxes, node: Node) -> frozenset[int]:
    """Return the sharded axes of an operator's tensors."""
    made = [Ref(node.name, item) for item, value in enumerate(node.outputs) if value]
    axes = {chosen.traced.sharded_axis(ref, chosen.axes) for ref in (*node.refs(), *made)}
    return frozenset(axis for axis in axes if axis is not None)


@contextmanager
def one_rank(module: nn.Module, plan: ShardPlan) -> Iterator[None]:
    """Give a module the shapes of one rank's shard, without values, and put it back."""
    parts = dict(module.named_modules(remove_duplicate=False))
    shards = shards_of(module, plan)
    numbers: list[tuple[nn.Module, str, int]] = []

    def local(slot: Slot) -> torch.Tensor | None:
        if slot.kind is not SlotKind.PARAMETER:
            return None
        shard = shards[slot.name]
        return torch.empty(shard.local_shape(plan.degree), dtype=slot.tensor.dtype, device="meta")

    try:
        with replaced(module, local):
            for path, shard in plan.modules.items():
                if path not in parts:  # of a layer that is taken out
                    continue
                for name, value in shard.attributes.items():
                    numbers.append((parts[path], name, numbers_of(parts[path]).get(name, value)))
                    setattr(parts[path], name, value)
            yield
    finally:
        for part, name, value in numbers:
            setattr(part, name, value)
