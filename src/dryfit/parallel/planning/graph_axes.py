"""Find the axes of a graph: apply every operator's rule once, in order."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dryfit.parallel.planning.axes import Axes, Dim, Obstacle, Reason
from dryfit.parallel.planning.rules import RULES
from dryfit.parallel.planning.rules.base import State, Step, Sum, unknown
from dryfit.parallel.trace.graph import MARKS, Graph, Leaf, LeafRole, Node, Ref, Value

_ARITHMETIC: Final = frozenset({"add", "sub", "mul", "div", "neg", "tanh", "clamp", "clamp_min", "clamp_max"})
_COPIES: Final = frozenset({"alias", "clone", "contiguous", "to", "_to_copy"})
_ON_EACH: Final = _ARITHMETIC | _COPIES
"""Operators on each score by itself, as in scaling and soft caps."""


@dataclass(slots=True)
class GraphAxes:
    """A graph with its axes.

    Attributes:
        axes: The axes.
        dims: Dimensions of each tensor.
        values: Shape and type of each tensor.
        sums: Sums over a dimension, by node.
        opened: Marks behind which a sharded output is gathered.
    """

    graph: Graph
    axes: Axes
    dims: dict[Ref, tuple[Dim, ...]]
    values: dict[Ref, Value]
    sums: dict[str, list[Sum]]
    opened: frozenset[str]
    _axes_of: dict[Ref, tuple[Dim, ...]] = field(default_factory=dict)

    def axes_of(self, ref: Ref) -> tuple[Dim, ...]:
        """Return the axes of each dimension of a tensor."""
        if ref not in self._axes_of:
            self._axes_of[ref] = tuple(self.axes.axes_of(dim) for dim in self.dims[ref])
        return self._axes_of[ref]

    def places(self, ref: Ref, axis: int) -> list[int]:
        """Return the dimensions of a tensor that contain an axis."""
        return [at for at, axes in enumerate(self.axes_of(ref)) for one in axes if one == axis]

    def sharded_axis(self, ref: Ref, sharded: frozenset[int]) -> int | None:
        """Return the sharded axis of a tensor; None where it is whole."""
        return next((axis for axes in self.axes_of(ref) for axis in axes if axis in sharded), None)


def find_axes(graph: Graph, opened: Iterable[str] = ()) -> GraphAxes:
    """Find the axes of a graph.

    Args:
        graph: A forward pass.
        opened: Names of marks behind which sharded outputs are gathered.
    """
    state = State(opened=frozenset(opened))
    for leaf in graph.leaves.values():
        ref = Ref(leaf.name)
        state.values[ref] = leaf.value
        state.dims[ref] = tuple(state.axes.new(size, _held(leaf)) for size in leaf.value.shape)
    for node in graph.nodes:
        for item, value in enumerate(node.outputs):
            if value:
                state.values[Ref(node.name, item)] = value
        step = Step(state, node)
        known = RULES.get(node.op)
        known.apply(step) if known else unknown(step)
    for ref in graph.outputs:
        for dim in state.dims[ref]:
            state.axes.replicate(dim, Reason(Obstacle.OUTPUT, "the model returns it, and what it returns is whole"))
    sums: dict[str, list[Sum]] = {}
    for met in state.sums:
        sums.setdefault(met.node, []).append(met)
    return GraphAxes(graph, state.axes, state.dims, state.values, sums, state.opened)


def _held(leaf: Leaf) -> Reason | None:
    match leaf.role:
        case LeafRole.PARAMETER:
            return None
        case LeafRole.BUFFER:
            return Reason(Obstacle.BUFFER, f"{leaf.name} is a table that each rank has all of")
        case LeafRole.INPUT:
            return Reason(Obstacle.ROWS, "each rank has the same tokens")


def score_mark(traced: GraphAxes) -> str | None:
    """Return the mark at which the scores are gathered that are all that the model returns; None if there is none.

    Only marks and operators on each score may stand between the mark and the output, and nothing else may use what is
    between them.
    """
    graph = traced.graph
    nodes = {node.name: node for node in graph.nodes}
    if len(graph.outputs) != 1:
        return None
    seen: dict[Ref, None] = {}
    ends: set[str] = set()
    left = [graph.outputs[0]]
    while left:
        ref = left.pop()
        node = nodes.get(ref.name)
        if node is None or traced.values[ref].shape != traced.values[graph.outputs[0]].shape:
            return None
        seen[ref] = None
        if node.name in traced.opened:
            ends.add(node.name)
        elif _on_each(node):
            left.extend(given for given in node.refs() if given not in seen)
        else:
            return None
    within = {ref.name for ref in seen}
    outside = any(
        ref in seen for node in graph.nodes if node.name not in within and any(node.outputs) for ref in node.refs()
    )
    return ends.pop() if len(ends) == 1 and not outside else None


def _on_each(node: Node) -> bool:
    return (node.op in MARKS or node.op in _ON_EACH) and any(True for _ in node.refs())
