"""How a module is sharded over ranks, checked by a second trace."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch
from torch import nn

from dryfit.gpu.slots import Slot, SlotKind, replaced
from dryfit.parallel.apply import shards_of
from dryfit.parallel.capture import OTHER, SMALL, CannotFollow, Inputs, capture, follow, for_all_layers, shortened
from dryfit.parallel.choose import TOKENS, ShardedAxes, choose
from dryfit.parallel.graph import Graph, Leaf, Node, Ref
from dryfit.parallel.marks import numbers_of
from dryfit.settings.errors import ConfigError, TraceError
from dryfit.settings.sharding import Boundary, ModuleShard, ParameterShard, ShardPlan

# Check by a second trace that a rank's shard of a model has the shapes of the plan.
#
# A size that the code has as a number does not shrink with the weights. Where it is an attribute of the module
# (``num_heads``), the rank's module gets its own value; where it is not, the module would compute something else or
# fail, and the axis stays whole. To find that out, a rank's module is traced at another batch size than the plan was
# made with, and every tensor's shape is compared.


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


# Plan how a module is sharded over ranks, without a process group or a device.


def plan_shards(
    module: nn.Module,
    degree: int,
    *,
    inputs: Inputs | None = None,
    tokens: int = TOKENS,
    loss_over_ranks: bool = False,
) -> ShardPlan:
    """Plan how a model is sharded over ranks.

    Args:
        module: A model, which may be on the meta device; it is not changed.
        degree: Number of ranks.
        inputs: Returns its keyword arguments, given rows and length; None: tokens and a mask.
        tokens: Tokens of a step, for weighing bytes sent against bytes saved.
        loss_over_ranks: Whether the loss is a cross entropy over the last dimension of the model's output and can be
            computed from a rank's part of it: vocabulary scores then stay sharded.

    Raises:
        ConfigError: Nothing can be sharded, or the degree does not divide it.
        TraceError: The model's code cannot be traced.
    """
    if degree < 2:
        raise ConfigError("planning how a model is sharded", f"{degree} ranks", "2 or more", "leave execution.tp away")
    with shortened(module) as stands_for:
        try:
            plan = _planned(module, degree, inputs, tokens, loss_over_ranks)
        except TraceError:
            if not stands_for:
                raise
            plan = None
    if plan is None:  # its code needs all of its layers
        return _planned(module, degree, inputs, tokens, loss_over_ranks)
    return for_all_layers(plan, module, stands_for)


def _planned(module: nn.Module, degree: int, inputs: Inputs | None, tokens: int, loss_over_ranks: bool) -> ShardPlan:
    graph = capture(module, inputs, SMALL)
    other = capture(module, inputs, OTHER)
    check_size(graph, other, module)
    refused: dict[str, str] = {}
    while True:
        chosen = choose(graph, degree, tokens, refused, loss_over_ranks=loss_over_ranks)
        wrong: list[ShapeMismatch] = []
        tried: list[Attributes] = []
        for computed in (False, True):
            attributes = read_numbers(chosen, other, degree, computed=computed)
            if attributes in tried:
                continue
            tried.append(attributes)
            plan = assemble(chosen, degree, attributes)
            mismatches = shape_mismatches(module, inputs, chosen, other, plan)
            if not mismatches:
                return plan
            wrong = wrong or mismatches
        refused |= _kept_whole(chosen, wrong)


def _kept_whole(chosen: ShardedAxes, wrong: list[ShapeMismatch]) -> dict[str, str]:
    """Return the parameters that stay whole because of shape_mismatches, in all layers alike, with the reason."""
    kept: dict[str, str] = {}
    for mismatch in wrong:
        patterns = {
            re.sub(r"\d+", "*", leaf.name)
            for leaf in chosen.traced.graph.parameters()
            if chosen.traced.sharded_axis(Ref(leaf.name), mismatch.axes) is not None
        }
        for leaf in chosen.traced.graph.parameters():
            if re.sub(r"\d+", "*", leaf.name) in patterns:
                kept[leaf.name] = mismatch.text
    return kept


def assemble(chosen: ShardedAxes, degree: int, attributes: Attributes) -> ShardPlan:
    """Return the plan for the chosen axes."""
    parameters: dict[str, ParameterShard] = {}
    for leaf in chosen.traced.graph.parameters():
        parameters[leaf.name] = _parameter(chosen, leaf)
        for name in leaf.names[1:]:
            parameters[name] = parameters[leaf.name].model_copy(update={"tied_to": leaf.name})
    return ShardPlan(
        degree=degree,
        parameters=parameters,
        modules=_modules(chosen, attributes),
        whole=dict(chosen.whole),
        scores=chosen.scores,
    )


def _parameter(chosen: ShardedAxes, leaf: Leaf) -> ParameterShard:
    traced, ref = chosen.traced, Ref(leaf.name)
    axis = traced.sharded_axis(ref, chosen.axes)
    if axis is None:
        return ParameterShard(shape=leaf.value.shape, sum_gradient=leaf.name in chosen.regions.summed)
    dim = traced.places(ref, axis)[0]
    outer, inner = traced.axes.layout(traced.dims[ref][dim], axis)
    block = leaf.value.shape[dim] // outer
    return ParameterShard(shape=leaf.value.shape, dim=dim, blocks=(block,) * outer, unit=inner)


def _modules(chosen: ShardedAxes, attributes: Attributes) -> dict[str, ModuleShard]:
    regions = chosen.regions
    inputs: dict[str, dict[str, Boundary]] = {}
    outputs: dict[str, dict[str, Boundary]] = {}
    for module, name in regions.copies:
        inputs.setdefault(module, {})[name] = Boundary.COPY
    for module, name in regions.reduces:
        outputs.setdefault(module, {})[name] = Boundary.REDUCE
    for module, name in regions.gathers:
        outputs.setdefault(module, {})[name] = Boundary.GATHER
    paths = sorted({*inputs, *outputs, *attributes, *regions.lookups, *regions.biases}, key=_in_order)
    return {
        path: ModuleShard(
            inputs=inputs.get(path, {}),
            outputs=outputs.get(path, {}),
            attributes=attributes.get(path, {}),
            vocabulary=path in regions.lookups,
            bias_after=path in regions.biases,
        )
        for path in paths
    }


def _in_order(path: str) -> list[tuple[int, str]]:
    """Return a sort key that orders layers by number."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
