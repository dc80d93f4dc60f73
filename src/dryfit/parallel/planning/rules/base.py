"""Rules of operators: functions that return which dimensions of an operator's tensors correspond."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dryfit.parallel.planning.axes import Axes, Dim, Obstacle, Reason
from dryfit.parallel.trace.graph import Node, Ref, Value


class Partial(StrEnum):
    """Whether an operator may be applied to partial sums, so that the sum can be made after it."""

    NEVER = "never"
    FIRST = "first"  # its first tensor may be a partial sum, no other: moving, scaling by a constant
    ONE = "one"  # exactly one of its tensors may be: products
    ALL = "all"  # all of them must be: sums


class SumKind(StrEnum):
    """How an operator sums over an axis."""

    PRODUCT = "product"
    LOOKUP = "lookup"  # a table's row for each id


@dataclass(frozen=True, slots=True)
class Sum:
    """An operator whose result is a sum over a dimension; partial sums where that is sharded.

    Attributes:
        node: The operator's name.
        dim: The dimension.
        kind: How it sums.
        bias: A tensor that is added once, not to each partial sum.
        weight: The table of a lookup.
    """

    node: str
    dim: Dim
    kind: SumKind = SumKind.PRODUCT
    bias: Ref | None = None
    weight: Ref | None = None


@dataclass(slots=True)
class State:
    """Axes, dimensions and sums known after some operators."""

    axes: Axes = field(default_factory=Axes)
    dims: dict[Ref, tuple[Dim, ...]] = field(default_factory=dict)
    values: dict[Ref, Value] = field(default_factory=dict)
    sums: list[Sum] = field(default_factory=list)
    opened: frozenset[str] = frozenset()
    """Marks behind which a sharded output is gathered."""


class Step:
    """One operator, as a rule sees it."""

    def __init__(self, state: State, node: Node) -> None:
        self.state = state
        self.axes = state.axes
        self.node = node

    def dims(self, ref: Ref) -> tuple[Dim, ...]:
        """Return the dimensions of a tensor."""
        return self.state.dims[ref]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.state.values[ref].shape

    def made(self, item: int = 0) -> tuple[int, ...]:
        """Return the shape of an output."""
        value = self.node.outputs[item]
        return value.shape if value else ()

    def out(self, dims: Iterable[Dim], item: int | None = None) -> None:
        """Set the dimensions of an output; None: of all."""
        made = tuple(dims)
        for at in range(len(self.node.outputs)) if item is None else (item,):
            self.state.dims[Ref(self.node.name, at)] = made

    def same(self, one: Dim, other: Dim) -> None:
        """Make two dimensions the same."""
        self.axes.unify(one, other, self.why("takes dimensions apart in two ways that cross", Obstacle.OPERATOR))

    def whole(self, dim: Dim, text: str = "needs all of a dimension") -> None:
        """Record that the operator needs all of a dimension."""
        self.axes.replicate(dim, self.why(text, Obstacle.OPERATOR))

    def fresh(self, size: int) -> Dim:
        """Return a new dimension."""
        return self.axes.new(size)

    def fixed(self, size: int, text: str = "needs all of a dimension") -> Dim:
        """Return a new dimension that cannot be sharded."""
        return self.axes.new(size, self.why(text, Obstacle.OPERATOR))

    def sum(
        self, dim: Dim, kind: SumKind = SumKind.PRODUCT, bias: Ref | None = None, weight: Ref | None = None
    ) -> None:
        """Record that the result is a sum over a dimension."""
        self.state.sums.append(Sum(self.node.name, dim, kind, bias, weight))

    def why(self, text: str, obstacle: Obstacle) -> Reason:
        """Return a reason that names the operator and its module."""
        return Reason(obstacle, f"{self.node.op} in {self.node.module or 'the model itself'} {text}")

    def broadcast(self, refs: Iterable[Ref], shape: tuple[int, ...]) -> list[Dim]:
        """Return the dimensions of tensors broadcast to one shape."""
        return self.stretched(map(self.dims, refs), len(shape))

    def stretched(self, tensors: Iterable[tuple[Dim, ...]], rank: int) -> list[Dim]:
        """Return the dimensions of tensors broadcast to one shape, given each tensor's dimensions."""
        made: list[Dim] = [()] * rank
        for dims in tensors:
            for at, dim in enumerate(dims, start=rank - len(dims)):
                if dim and made[at]:
                    self.same(made[at], dim)
                made[at] = made[at] or dim
        return made

    def stretch_to(self, dims: Sequence[Dim], made: Sequence[Dim]) -> None:
        """Broadcast a tensor to a shape that other tensors determine."""
        for dim, like in zip(reversed(dims), reversed(made), strict=False):
            if dim and like:
                self.same(dim, like)


Handler = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """An operator's rule."""

    apply: Handler
    partial: Partial


RULES: Final[dict[str, Rule]] = {}
"""Rules by the operator's name."""


def rule(names: str, partial: Partial = Partial.NEVER) -> Callable[[Handler], Handler]:
    """Register a function as the rule of some operators, named in one text."""

    def known(apply: Handler) -> Handler:
        for name in names.split():
            RULES[name] = Rule(apply, partial)
        return apply

    return known


def unknown(step: Step) -> None:
    """Rule of an unknown operator: nothing that goes into it can be sharded."""
    reason = step.why("has no rule here", Obstacle.UNKNOWN)
    for ref in step.node.refs():
        for dim in step.dims(ref):
            step.axes.replicate(dim, reason)
    for item in range(len(step.node.outputs)):
        step.out((step.axes.new(size, reason) for size in step.made(item)), item)


def positive(dim: int, rank: int) -> int:
    """Return a dimension's index counted from the front."""
    return dim + rank if dim < 0 else dim
