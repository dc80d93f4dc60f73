"""Find the axes of a graph: apply every operator's rule once, in order."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dryfit.parallel.planning.axes import Axes, Dim, Hold, Reason
from dryfit.parallel.planning.rules import RULES
from dryfit.parallel.planning.rules.base import State, Step, Sum, unknown
from dryfit.parallel.trace.graph import Graph, Leaf, LeafRole, Ref, Value


@dataclass(slots=True)
class Solved:
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

    def cut_of(self, ref: Ref, cut: frozenset[int]) -> int | None:
        """Return the sharded axis of a tensor; None where it is whole."""
        return next((axis for axes in self.axes_of(ref) for axis in axes if axis in cut), None)


def solve(graph: Graph, opened: Iterable[str] = ()) -> Solved:
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
            state.axes.hold(dim, Reason(Hold.OUTPUT, "the model returns it, and what it returns is whole"))
    sums: dict[str, list[Sum]] = {}
    for met in state.sums:
        sums.setdefault(met.node, []).append(met)
    return Solved(graph, state.axes, state.dims, state.values, sums, state.opened)


def _held(leaf: Leaf) -> Reason | None:
    match leaf.role:
        case LeafRole.PARAMETER:
            return None
        case LeafRole.TABLE:
            return Reason(Hold.TABLE, f"{leaf.name} is a table that each rank has all of")
        case LeafRole.INPUT:
            return Reason(Hold.ROWS, "each rank has the same tokens")
