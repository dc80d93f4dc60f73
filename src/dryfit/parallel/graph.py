"""A module's forward pass as data, without torch: leaves, operators and outputs.

Nodes stand in the order they ran. In-place operators are written as out-of-place ones: later users of the old tensor
use the new one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TypeAlias

from dryfit.settings.errors import InternalError


@dataclass(frozen=True, slots=True)
class Ref:
    """One tensor: an output of a node, or a leaf."""

    name: str
    item: int = 0


Arg: TypeAlias = "Ref | int | float | bool | str | tuple[Arg, ...] | None"


class LeafRole(StrEnum):
    """A leaf's role in the module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"  # a buffer or a constant: each rank has all of it
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's shape and type."""

    shape: tuple[int, ...]
    floating: bool
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of all elements."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that no node made.

    Attributes:
        names: All names of a parameter; the later ones are tied to the first.
    """

    name: str
    role: LeafRole
    value: Value
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an integer argument of an operator comes from.

    Attributes:
        position: Index among the operator's integers, from 0.
        attributes: Attributes of modules that it was read from, as (module, attribute).
        exact: Whether it is the attribute itself; else it was computed from them.
    """

    position: int
    attributes: tuple[tuple[str, str], ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One operator that ran.

    Attributes:
        op: Name, without the prefix ``aten``: "view", "linear".
        args: Arguments by the names of the operator's schema, defaults filled in.
        outputs: Output tensors; None for outputs that are no tensor.
        module: Path of the innermost module that ran it.
        grad: Whether gradients pass through it: False under ``torch.no_grad``.
        origins: Origins of integer arguments that come from modules.
    """

    name: str
    op: str
    args: Mapping[str, Arg]
    outputs: tuple[Value | None, ...]
    module: str
    grad: bool = True
    origins: tuple[Origin, ...] = ()

    def refs(self) -> Iterator[Ref]:
        """Yield the tensor arguments, in order."""
        for value in self.args.values():
            yield from refs_in(value)

    def integers(self) -> tuple[int, ...]:
        """Return the integer arguments, in order."""
        return tuple(number for value in self.args.values() for number in _integers(value))

    def ref(self, name: str) -> Ref:
        """Return a required tensor argument."""
        value = self.args[name]
        if not isinstance(value, Ref):
            raise InternalError(f"reading {self.op}", f"its argument {name} is {value!r}", "a tensor")
        return value

    def optional(self, name: str) -> Ref | None:
        """Return an optional tensor argument."""
        value = self.args.get(name)
        return value if isinstance(value, Ref) else None

    def integer(self, name: str, default: int = 0) -> int:
        """Return an integer argument."""
        value = self.args.get(name)
        return int(value) if isinstance(value, int | float) else default

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; one integer gives a list of one."""
        value = self.args.get(name)
        return _integers(value)

    def tensors(self, name: str) -> tuple[Ref, ...]:
        """Return a list of tensors."""
        return tuple(refs_in(self.args.get(name)))


ENTER = "dryfit::enter"
"""Marks a floating-point input of a module; its arguments are ``x``, ``module`` and ``name``."""

LEAVE = "dryfit::leave"
"""Marks a floating-point output of a module; its arguments are ``x``, ``module`` and ``name``."""

MARKS = frozenset({ENTER, LEAVE})


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward pass.

    Attributes:
        leaves: By name; one entry for tied parameters.
        nodes: In order.
        outputs: What the module returns.
        tokens: Rows times length of the inputs it was captured with.
        numbers: Integer attributes of each module, by path.
    """

    leaves: Mapping[str, Leaf]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    tokens: int
    numbers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def parameters(self) -> Iterator[Leaf]:
        """Return the leaves that are parameters."""
        return (leaf for leaf in self.leaves.values() if leaf.role is LeafRole.PARAMETER)


def refs_in(value: Arg) -> Iterator[Ref]:
    """Yield the tensors in an argument."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_in(item)


def _integers(value: Arg) -> tuple[int, ...]:
    if isinstance(value, bool):
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, tuple):
        return tuple(number for item in value for number in _integers(item))
    return ()
