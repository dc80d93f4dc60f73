"""Axes: which dimensions of which tensors are the same, so that they are sharded together.

A dimension is a product of axes, the outermost first: the features of a projection are heads times features of a head,
and so is the dimension of its weight. Axes that an operator needs to be equal become one. Sharding an axis then shards
all tensors that have it, without a search. The factors of dimensions are those of OpenXLA's Shardy ("op sharding
rules", 2024).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TypeAlias

from dryfit.settings.errors import InternalError

Dim: TypeAlias = tuple[int, ...]
"""Axes of a dimension, the outermost first; none where its size is 1. Read them with :meth:`Axes.axes_of`."""


class Obstacle(StrEnum):
    """What keeps an axis from being sharded."""

    ROWS = "rows"  # each rank has the same tokens
    BUFFER = "buffer"  # a buffer or constant is whole on each rank
    OPERATOR = "operator"  # an operator needs all of it
    UNKNOWN = "unknown"  # an operator without a rule
    OUTPUT = "output"  # what the model returns is whole
    LOSS = "loss"  # a sum over classes, with something that is no sum


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an axis cannot be sharded, and where."""

    obstacle: Obstacle
    text: str


class Axes:
    """The axes of a graph, merged and split as operators require."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._root: list[int] = []
        self._parts: list[Dim] = []
        self._reasons: list[dict[Obstacle, Reason]] = []

    def new(self, size: int, reason: Reason | None = None) -> Dim:
        """Return a new dimension, of a new axis."""
        if size == 1:
            return ()
        self._size.append(size)
        self._root.append(len(self._root))
        self._parts.append(())
        self._reasons.append({reason.obstacle: reason} if reason else {})
        return (len(self._root) - 1,)

    def find(self, axis: int) -> int:
        """Return the representative of all axes equal to this one."""
        root = axis
        while self._root[root] != root:
            root = self._root[root]
        while self._root[axis] != root:
            self._root[axis], axis = root, self._root[axis]
        return root

    def size(self, axis: int) -> int:
        """Return the number of elements of an axis."""
        return self._size[self.find(axis)]

    def axes_of(self, dim: Dim) -> Dim:
        """Return the axes of a dimension as they are now, none of them a product of others."""
        axes: list[int] = []
        left = list(reversed(dim))
        while left:
            root = self.find(left.pop())
            if self._parts[root]:
                left.extend(reversed(self._parts[root]))
            else:
                axes.append(root)
        return tuple(axes)

    def length(self, dim: Dim) -> int:
        """Return the number of elements of a dimension."""
        return prod(self.size(axis) for axis in dim)

    def split(self, axis: int, outer: int) -> Dim:
        """Split an axis into the product of two, the outer one of a size that divides it."""
        root = self.find(axis)
        if self._parts[root] or self._size[root] % outer:
            raise InternalError("splitting an axis", f"{self._size[root]} by {outer}", "an axis that it divides")
        parts = (*self.new(outer), *self.new(self._size[root] // outer))
        for part in parts:
            self._reasons[part].update(self._reasons[root])
        self._parts[root] = parts
        return parts

    def replicate(self, dim: Dim, reason: Reason) -> None:
        """Record that no axis of a dimension can be sharded."""
        for axis in self.axes_of(dim):
            self._reasons[axis].setdefault(reason.obstacle, reason)

    def reasons(self, axis: int) -> tuple[Reason, ...]:
        """Return why an axis cannot be sharded; empty where it can."""
        return tuple(self._reasons[self.find(axis)].values())

    def unify(self, one: Dim, other: Dim, reason: Reason) -> None:
        """Make two dimensions of one size the same.

        Args:
            one: A dimension.
            other: Another.
            reason: Recorded where their axes cross, as 2 x 3 and 3 x 2 do: neither can be sharded then.
        """
        while True:
            left, right = self.axes_of(one), self.axes_of(other)
            position = next(
                (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
            )
            if position == len(left) and position == len(right):
                return
            if position in (len(left), len(right)) or not self._join(left[position], right[position]):
                self.replicate((*left, *right), reason)
                return

    def _join(self, one: int, other: int) -> bool:
        """Merge two axes, splitting the longer one into a product that begins with the shorter one."""
        a, b = self._size[one], self._size[other]
        if a == b:
            self._root[other] = one
            self._reasons[one].update(self._reasons[other])
            return True
        long, short = (one, other) if a > b else (other, one)
        if self._size[long] % self._size[short]:
            return False
        outer = self.split(long, self._size[short])[0]
        return self._join(outer, short)

    def regroup(self, dims: Iterable[Dim], shape: tuple[int, ...]) -> list[Dim] | None:
        """Return the dimensions after a reshape; None where an axis lies across two of the new dimensions."""
        flat: Dim = tuple(axis for dim in dims for axis in dim)
        made: list[Dim] = []
        for size in shape:
            taken: list[int] = []
            left = size
            while left > 1:
                flat = self.axes_of(flat)
                if not flat:
                    return None
                length = self._size[flat[0]]
                if left % length and length % left:
                    return None
                if length > left:
                    self.split(flat[0], left)
                    continue
                taken.append(flat[0])
                left //= length
                flat = flat[1:]
            made.append(tuple(taken))
        return made

    def layout(self, dim: Dim, axis: int) -> tuple[int, int]:
        """Return how often an axis is repeated along a dimension, and the stride of its steps."""
        axes = self.axes_of(dim)
        at = axes.index(self.find(axis))
        return self.length(axes[:at]), self.length(axes[at + 1 :])
