"""Whether two models of one class run the same program but for their sizes, whole and cut.

Both are followed on tensors without values, and so is one rank's part of each. The four programs must have the same
operators on the same tensors; and of what each operator makes, a rank must hold the same share in both models.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Final, NoReturn, TypeAlias

from torch import nn
from transformers.pytorch_utils import Conv1D

from dryfit.core.sharding.shard_plan import ModuleShard, ShardPlan
from dryfit.parallel.planning.rank_shapes import one_rank
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.trace.capture import SMALL, CannotFollow, Inputs, follow
from dryfit.parallel.trace.graph import Arg, Graph, Node, Ref
from dryfit.parallel.trace.repeats import shortened

_COPIES: Final = frozenset({"contiguous", "clone"})
"""Operators that torch leaves away where a tensor lies as it should already."""

_SAME: Final = "the same operators"

Cut: TypeAlias = tuple[nn.Module, ShardPlan]
"""A whole model, and how it is cut."""

_Acting: TypeAlias = tuple[Node, tuple[object, ...]]
"""An operator, and what it was given: tensors by the operator that made them."""


class Difference(Exception):  # noqa: N818 - it is an answer, not a fault
    """Two models differ in more than their sizes.

    Args:
        found: What was found, and in which module.
        allowed: What should have been.
    """

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(found)
        self.allowed = allowed


def check_same_program(wide: Cut, narrow: Cut, inputs: Inputs | None) -> None:
    """Compare two models, whole and cut.

    Args:
        wide: A model with its plan.
        narrow: A narrower one with the same plan, but for sizes.
        inputs: What both are called with, without values.

    Raises:
        Difference: They differ in more than their sizes, or cannot be followed; names the first module.
    """
    with shortened(wide[0]) as before, shortened(narrow[0]) as after:
        if before != after:
            raise Difference("other layers are alike in the narrow model", "layers that repeat as the wide ones do")
        try:
            programs = _programs(wide, narrow, inputs)
        except CannotFollow as no:
            if not before:
                raise _not_followed(no) from no
            programs = None
    if programs is None:  # its code counts on all of its layers
        try:
            programs = _programs(wide, narrow, inputs)
        except CannotFollow as no:
            raise _not_followed(no) from no
    for whole, other, part, other_part in zip_longest(*map(_acting, programs)):
        _compare(whole, other, part, other_part)


def _programs(wide: Cut, narrow: Cut, inputs: Inputs | None) -> tuple[Graph, Graph, Graph, Graph]:
    return (
        follow(wide[0], inputs, SMALL),
        follow(narrow[0], inputs, SMALL),
        _of_rank(*wide, inputs),
        _of_rank(*narrow, inputs),
    )


def _of_rank(module: nn.Module, plan: ShardPlan, inputs: Inputs | None) -> Graph:
    """What a rank's part runs; rows of layers that are out are left out."""
    shards = shards_of(module, plan)
    modules: dict[str, ModuleShard] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        what = plan.modules.get(path)
        if isinstance(part, Conv1D):  # it computes with the size that it says, which cutting it changes
            own = {"nf": shards[f"{path}.weight"].local_shape(plan.degree)[1]}
            what = what or ModuleShard()
            what = what.model_copy(update={"attributes": {**what.attributes, **own}})
        if what is not None:
            modules[path] = what
    with one_rank(module, shards, modules, plan.degree):
        return follow(module, inputs, SMALL, shards=modules, degree=plan.degree)


def _not_followed(no: CannotFollow) -> Difference:
    return Difference(
        f"{no.module or 'the model'} fails on a rank's slices, or cannot be followed ({no.text})",
        "code that computes with whatever sizes its weights have",
    )


def _compare(whole: _Acting | None, narrow: _Acting | None, part: _Acting | None, narrow_part: _Acting | None) -> None:
    """Compare one operator of each program."""
    if whole is None or narrow is None or not _alike(whole, narrow):
        _refuse(narrow, whole, "the narrow model")
    if part is None or (whole[0].op, _kinds(whole[0])) != (part[0].op, _kinds(part[0])):
        _refuse(part, whole, "a rank's part")
    if narrow_part is None or not _alike(part, narrow_part):
        _refuse(narrow_part, part, "a rank's part of the narrow model")
    _check_share((whole[0], part[0]), (narrow[0], narrow_part[0]))


def _acting(graph: Graph) -> Iterator[_Acting]:
    """The operators of a program that are there in any case, each with what it was given but for sizes."""
    known: dict[str, object] = {}
    for node in graph.nodes:
        if node.op in _COPIES:
            source = next(node.refs())
            known[node.name] = known.get(source.name, source.name)
            continue
        given = tuple((name, _given(value, known)) for name, value in node.args.items() if name != "memory_format")
        yield node, given
        known[node.name] = len(known)


def _given(value: Arg, known: Mapping[str, object]) -> object:
    if isinstance(value, Ref):
        return "tensor", known.get(value.name, value.name), value.item
    if isinstance(value, tuple):
        return tuple(_given(one, known) for one in value)
    return value


def _alike(one: _Acting, other: _Acting) -> bool:
    """Whether two operators are the same but for sizes."""
    return (
        (one[0].op, one[0].module) == (other[0].op, other[0].module)
        and _kinds(one[0]) == _kinds(other[0])
        and _same_but_sizes(one[1], other[1])
    )


def _kinds(node: Node) -> list[object]:
    """Of each thing that an operator makes, its number of dimensions and whether it is in floating point."""
    return [(len(value.shape), value.floating) if value else None for value in node.outputs]


def _same_but_sizes(one: object, other: object) -> bool:
    """Equal, but for integers that are smaller in the second, and what was computed from them."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_but_sizes, one, other))
    if type(one) is int and type(other) is int:
        return one == other or one > other > 0
    if isinstance(one, float) and isinstance(other, float):
        return True
    return one == other


def _refuse(found: _Acting | None, expected: _Acting | None, who: str) -> NoReturn:
    raise Difference(f"{who} runs {_named(found)} where {_named(expected)} should run", _SAME)


def _named(acting: _Acting | None) -> str:
    return f"{acting[0].op} in {acting[0].module or 'the model itself'}" if acting else "nothing"


def _check_share(wide: tuple[Node, Node], narrow: tuple[Node, Node]) -> None:
    """Whether a rank's part of what an operator makes is the same share of it in both models, in each dimension."""
    for values in zip(*(node.outputs for node in (*wide, *narrow)), strict=True):
        shapes = [value.shape for value in values if value]
        for whole, part, other, other_part in zip(*shapes, strict=True):
            if whole * other_part != other * part:
                raise Difference(
                    f"{wide[0].op} in {wide[0].module or 'the model itself'} makes {part} of {whole} on a rank, in the "
                    f"narrow model {other_part} of {other}",
                    "the same share: a size stands in the code that is no attribute of the module",
                )
