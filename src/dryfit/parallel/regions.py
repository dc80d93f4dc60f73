"""Axes of a graph, and the collectives at the edges of its sharded regions."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dryfit.parallel.axes import Axes, Dim, Obstacle, Reason
from dryfit.parallel.graph import ENTER, LEAVE, MARKS, Graph, Leaf, LeafRole, Node, Ref, Value
from dryfit.parallel.rules import RULES, Partial, State, Step, Sum, SumKind, unknown

# Find the axes of a graph: apply every operator's rule once, in order.


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


# Place the collectives at the edges of sharded regions: where outputs are reduced or gathered, and gradients summed.
#
# Forward, an operator that sums over a sharded axis gives each rank a partial sum. Partial sums are added where the
# next module ends; until then only operators that commute with a sum may use them. Backward, a whole tensor that is
# used by something sharded gets a partial gradient from each rank. These are added at the input of a module, the
# outermost one in which the tensor has no other use; where no module lies between, at the parameter that it was
# computed from.


Place = tuple[str, str]
"""A module and the name of one of its inputs or outputs."""


class CannotShard(Exception):  # noqa: N818 - it is an answer, not a fault
    """Some axes cannot be sharded together.

    Args:
        why: The obstacle, by axis.
    """

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__("; ".join(sorted(set(why.values()))))
        self.why = dict(why)

    @classmethod
    def all_of(cls, axes: Iterable[int], text: str) -> "CannotShard":
        """Return an error with one obstacle for all axes."""
        return cls(dict.fromkeys(axes, text))


@dataclass(slots=True)
class Regions:
    """Places of collectives.

    Attributes:
        partial_sums: Tensors of which each rank has a partial sum, with the axis that the sum is over.
        reduces: Outputs that are reduced, with the tensor.
        gathers: Outputs that are gathered.
        copies: Inputs whose gradients are summed.
        summed: Parameters whose gradients are summed.
        lookups: Modules with a table of which each rank has some rows.
        biases: Modules whose bias is added after the sum.
        at: Names of the marks at which a collective runs.
    """

    partial_sums: dict[Ref, int] = field(default_factory=dict)
    reduces: dict[Place, Ref] = field(default_factory=dict)
    gathers: dict[Place, Ref] = field(default_factory=dict)
    copies: dict[Place, Ref] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    lookups: set[str] = field(default_factory=set)
    biases: set[str] = field(default_factory=set)
    at: set[str] = field(default_factory=set)


def find_regions(traced: GraphAxes, sharded: frozenset[int]) -> Regions:
    """Return the collectives that sharding some axes needs.

    Raises:
        CannotShard: They cannot be placed between modules.
    """
    regions = Regions()
    forward = _Forward(traced, sharded, regions)
    for node in traced.graph.nodes:
        forward.visit(node)
    for ref in traced.graph.outputs:
        if ref in regions.partial_sums:
            forward.cannot([regions.partial_sums[ref]], "the model returns a sum that no module ends with")
    for _, (module, _) in _treated_unlike(traced.graph, regions.at):
        forward.cannot(sharded, f"{module} is called several times, and what it returns is not a sum each time")
    if forward.why:
        raise CannotShard(forward.why)
    unlike: set[Place] = set()
    while True:
        found = copy.deepcopy(regions)
        _Backward(traced, sharded, found, frozenset(unlike)).run()
        more = {place for op, place in _treated_unlike(traced.graph, found.at) if op == ENTER}
        if not more:
            return found
        unlike |= more


class _Forward:
    def __init__(self, traced: GraphAxes, sharded: frozenset[int], regions: Regions) -> None:
        self.traced = traced
        self.sharded = sharded
        self.regions = regions
        self.why: dict[int, str] = {}

    def cannot(self, axes: Iterable[int], text: str) -> None:
        """Note why some axes cannot be sharded."""
        for axis in axes:
            self.why.setdefault(axis, text)

    def visit(self, node: Node) -> None:
        partial_sums = [self.regions.partial_sums[ref] for ref in node.refs() if ref in self.regions.partial_sums]
        if node.op == LEAVE:
            self._leave(node, bool(partial_sums))
            return
        met = [
            (one, axis)
            for one in self.traced.sums.get(node.name, ())
            for axis in self.traced.axes.axes_of(one.dim)
            if axis in self.sharded
        ]
        if partial_sums:
            self._pass(node, partial_sums, summing=bool(met))
        for one, axis in met:
            self._sum(node, one, axis)
            partial_sums.append(axis)
        if partial_sums:
            for item, value in enumerate(node.outputs):
                if value and value.floating:
                    self.regions.partial_sums[Ref(node.name, item)] = partial_sums[0]

    def _leave(self, node: Node, shared: bool) -> None:
        source = node.ref("x")
        place = (node.module, str(node.args["name"]))
        if shared:
            self.regions.reduces[place] = source
            self.regions.at.add(node.name)
        elif node.name in self.traced.opened and self.traced.sharded_axis(source, self.sharded) is not None:
            self.regions.gathers[place] = source
            self.regions.at.add(node.name)

    def _pass(self, node: Node, partial_sums: list[int], *, summing: bool) -> None:
        """Check that a sum may be made after an operator instead of before it."""
        known = RULES.get(node.op)
        given = list(node.refs())
        whole = [ref for ref in given if ref not in self.regions.partial_sums]
        number = node.args.get("other")
        match known.partial if known else Partial.NEVER:
            case Partial.NEVER:
                may = False
            case Partial.FIRST:
                may = given[0] in self.regions.partial_sums and len(partial_sums) == 1
            case Partial.ONE:
                may = len(partial_sums) == 1 and not node.optional("bias")
            case Partial.ALL:
                may = not whole and not (isinstance(number, int | float) and number)
        sharded_too = any(self.traced.sharded_axis(ref, self.sharded) is not None for ref in whole)
        if not may or summing or sharded_too or len(set(partial_sums)) > 1:
            where = node.module or "the model itself"
            self.cannot(partial_sums, f"a sum over ranks would be needed before {node.op} in {where}")

    def _sum(self, node: Node, one: Sum, axis: int) -> None:
        if one.kind is SumKind.LOOKUP:
            self._own(node, one.weight, "weight", axis)
            self.regions.lookups.add(node.module)
        elif one.bias is not None:
            self._own(node, one.bias, "bias", axis)
            self.regions.biases.add(node.module)

    def _own(self, node: Node, ref: Ref | None, name: str, axis: int) -> None:
        """Check that a tensor belongs to the module that uses it, which applies the plan's row."""
        leaf = self.traced.graph.leaves.get(ref.name) if ref else None
        if leaf is None or leaf.role is not LeafRole.PARAMETER or f"{node.module}.{name}" not in leaf.names:
            self.cannot([axis], f"{node.op} in {node.module or 'the model itself'} uses a {name} of another module")


@dataclass(frozen=True, slots=True)
class _PartialGradient:
    """A whole tensor whose gradient is partial on each rank.

    Attributes:
        axes: The axes sharded where the tensor is used.
        marks: Inputs of modules at which the partial gradients could be added; empty where there is none.
    """

    axes: frozenset[int]
    marks: frozenset[str] = frozenset()


class _Backward:
    """Finds where gradients are summed; ``unlike`` are inputs at which they must not be."""

    def __init__(self, traced: GraphAxes, sharded: frozenset[int], regions: Regions, unlike: frozenset[Place]) -> None:
        self.traced = traced
        self.sharded = sharded
        self.regions = regions
        self.unlike = unlike
        self.uses: dict[Ref, list[Node]] = {}
        self.partials: dict[str, _PartialGradient | None] = {}
        self.nodes = {node.name: node for node in traced.graph.nodes}

    def run(self) -> None:
        learning = {Ref(leaf.name) for leaf in self.traced.graph.parameters() if leaf.value.floating}
        followed: list[Node] = []
        for node in self.traced.graph.nodes:
            given = [ref for ref in node.refs() if ref in learning]
            if not given or not node.grad or node.op == "detach":
                continue
            made = [Ref(node.name, item) for item, value in enumerate(node.outputs) if value and value.floating]
            learning.update(made)
            if made:
                followed.append(node)
                for ref in given:
                    self.uses.setdefault(ref, []).append(node)
        for node in reversed(followed):
            self.partials[node.name] = self._of_node(node)
        for leaf in self.traced.graph.parameters():
            self._of_leaf(leaf)

    def _of_leaf(self, leaf: Leaf) -> None:
        """Sum a parameter's own gradient, once in a step, where every use of it is sharded."""
        if self._of_tensor(Ref(leaf.name)):
            self.regions.summed.add(leaf.name)

    def _of_node(self, node: Node) -> _PartialGradient | None:
        """Return the partial gradients that pass backward through an operator."""
        made = [Ref(node.name, item) for item in range(len(node.outputs))]
        states = {ref: self._of_tensor(ref) for ref in made if ref in self.uses}
        partials = [state for state in states.values() if state]
        if not partials:
            return None
        axes = frozenset(axis for state in partials for axis in state.axes)
        marks = frozenset(mark for state in partials for mark in state.marks)
        if node.op == ENTER and (node.module, str(node.args["name"])) not in self.unlike:
            return _PartialGradient(axes, frozenset({node.name}))
        bare = any(not state.marks for state in partials)
        mixed = len(partials) < len(states)
        if node.op == LEAVE and node.name in self.regions.at and bare:
            # A reduce or gather there passes gradients on as they are: they must be complete.
            raise CannotShard.all_of(axes, f"gradients of what {node.module} returns would come as partial sums")
        if bare and mixed:
            raise CannotShard.all_of(
                axes, f"only a part of what {node.op} in {node.module} makes goes to something sharded"
            )
        if bare:
            return _PartialGradient(axes)
        known = RULES.get(node.op)
        moves = known is not None and known.partial is Partial.FIRST and len(list(node.refs())) == 1
        if moves and not mixed and node.name not in self.regions.at:
            return _PartialGradient(axes, marks)
        self._add_at(marks)
        return None

    def _of_tensor(self, ref: Ref) -> _PartialGradient | None:
        """Return whether a whole tensor's gradient is partial and not yet summed."""
        if ref in self.regions.partial_sums or self.traced.sharded_axis(ref, self.sharded) is not None:
            return None
        whole = False
        partials: list[_PartialGradient] = []
        for node in self.uses.get(ref, ()):
            state = self._of_use(node, ref)
            whole = whole or state is None
            partials.extend([state] if state else [])
        if not partials:
            return None
        axes = frozenset(axis for state in partials for axis in state.axes)
        marks = frozenset(mark for state in partials for mark in state.marks)
        if not whole:
            return _PartialGradient(axes, marks if all(state.marks for state in partials) else frozenset())
        if not all(state.marks for state in partials):
            raise CannotShard.all_of(
                axes, f"{self._named(ref)} is used by something sharded and something whole in one module"
            )
        self._add_at(marks)
        return None

    def _of_use(self, node: Node, ref: Ref) -> _PartialGradient | None:
        axes = {self._sharded_axis_of_output(Ref(node.name, item)) for item, value in enumerate(node.outputs) if value}
        axes.discard(None)
        if not axes:
            return self.partials[node.name]
        added_behind = any(one.bias == ref for one in self.traced.sums.get(node.name, ()))
        return None if added_behind and node.module in self.regions.biases else _PartialGradient(frozenset(axes))  # type: ignore[arg-type]

    def _sharded_axis_of_output(self, ref: Ref) -> int | None:
        return self.regions.partial_sums.get(ref, self.traced.sharded_axis(ref, self.sharded))

    def _add_at(self, marks: frozenset[str]) -> None:
        for name in marks:
            node = self.nodes[name]
            self.regions.copies[node.module, str(node.args["name"])] = node.ref("x")
            self.regions.at.add(name)

    def _named(self, ref: Ref) -> str:
        node = self.nodes.get(ref.name)
        return f"what {node.op} in {node.module or 'the model itself'} makes" if node else ref.name


def _treated_unlike(graph: Graph, at: set[str]) -> set[tuple[str, Place]]:
    """Return inputs and outputs of repeatedly called modules that have a collective in some of the calls only."""
    treated: dict[tuple[str, Place], bool] = {}
    unlike: set[tuple[str, Place]] = set()
    for node in graph.nodes:
        if node.op in MARKS:
            call = (node.op, (node.module, str(node.args["name"])))
            if treated.setdefault(call, node.name in at) != (node.name in at):
                unlike.add(call)
    return unlike
