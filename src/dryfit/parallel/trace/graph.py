"""A module's forward pass as data: what the solver reads, without torch.

Nodes stand in the order they ran. In-place operators are written as those that make a new tensor; whoever used the old
one uses the new one from then on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TypeAlias

from dryfit.core.errors import InternalError


@dataclass(frozen=True, slots=True)
class Ref:
    """One tensor: an output of a node, or a leaf."""

    name: str
    item: int = 0


Arg: TypeAlias = "Ref | int | float | bool | str | tuple[Arg, ...] | None"


class LeafRole(StrEnum):
    """What a leaf is to the module."""

    PARAMETER = "parameter"
    TABLE = "table"  # a buffer or a constant: each rank has all of it
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor."""

    shape: tuple[int, ...]
    floating: bool
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that no node made.

    Attributes:
        names: All names of a parameter, its first one first; others are tied to it.
    """

    name: str
    role: LeafRole
    value: Value
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a number that is a size comes from.

    Attributes:
        position: Which of the integers the operator was given, counted from 0.
        attributes: Attributes of modules that were read for it, as (module, attribute).
        exact: It is the attribute itself; otherwise it was computed from them.
    """

    position: int
    attributes: tuple[tuple[str, str], ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One operator that ran.

    Attributes:
        op: Its name, without a library's prefix where that is ``aten``: "view", "linear".
        args: By the names of the operator's schema, defaults filled in.
        outputs: What it made; None where that is no tensor.
        module: Path of the innermost module that ran it.
        grad: Whether gradients go through it: False under ``torch.no_grad``.
        origins: Of the integers among the arguments, those read from modules.
    """

    name: str
    op: str
    args: Mapping[str, Arg]
    outputs: tuple[Value | None, ...]
    module: str
    grad: bool = True
    origins: tuple[Origin, ...] = ()

    def refs(self) -> Iterator[Ref]:
        """The tensors it was given, in order."""
        for value in self.args.values():
            yield from refs_in(value)

    def integers(self) -> tuple[int, ...]:
        """The integers it was given, in order."""
        return tuple(number for value in self.args.values() for number in _integers(value))

    def ref(self, name: str) -> Ref:
        """A tensor that it must have been given."""
        value = self.args[name]
        if not isinstance(value, Ref):
            raise InternalError(f"reading {self.op}", f"its argument {name} is {value!r}", "a tensor")
        return value

    def optional(self, name: str) -> Ref | None:
        """A tensor that it may have been given."""
        value = self.args.get(name)
        return value if isinstance(value, Ref) else None

    def integer(self, name: str, default: int = 0) -> int:
        """An integer argument."""
        value = self.args.get(name)
        return int(value) if isinstance(value, int | float) else default

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of integers, or one integer as a list."""
        value = self.args.get(name)
        return _integers(value)

    def tensors(self, name: str) -> tuple[Ref, ...]:
        """A list of tensors."""
        return tuple(refs_in(self.args.get(name)))


ENTER = "dryfit::enter"
"""A floating-point input where it goes into a module; its arguments are ``x``, ``module`` and ``name``."""

LEAVE = "dryfit::leave"
"""A floating-point output where it leaves a module; its arguments are ``x``, ``module`` and ``name``."""

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
        """The leaves that are parameters."""
        return (leaf for leaf in self.leaves.values() if leaf.role is LeafRole.PARAMETER)


def refs_in(value: Arg) -> Iterator[Ref]:
    """The tensors in an argument."""
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
