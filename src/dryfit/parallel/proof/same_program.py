"""Check that two models of one class run the same program but for sizes, whole and sharded.

Both are traced on tensors without values, and so is one rank's shard of each. The four programs must run the same
operators on the same tensors, and a rank must hold the same share of every operator's output in both models.
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
"""Operators that torch omits where a tensor's memory layout is right already."""

_SAME: Final = "the same operators"

Planned: TypeAlias = tuple[nn.Module, ShardPlan]
"""A whole model and its plan."""

_Call: TypeAlias = tuple[Node, tuple[object, ...]]
"""An operator and its arguments: tensors by the operator that made them."""


class Difference(Exception):  # noqa: N818 - it is an answer, not a fault
    """Two models differ in more than their sizes.

    Args:
        problem: The difference, with its module.
        allowed: What was expected.
    """

    def __init__(self, problem: str, allowed: str) -> None:
        super().__init__(problem)
        self.allowed = allowed


def check_same_program(wide: Planned, narrow: Planned, inputs: Inputs | None) -> None:
    """Compare two models, whole and sharded.

    Args:
        wide: A model with its plan.
        narrow: A narrower one with the same plan, but for sizes.
        inputs: Inputs of both, without values.

    Raises:
        Difference: They differ in more than their sizes, or cannot be traced; the first module is named.
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
    if programs is None:  # its code needs all of its layers
        try:
            programs = _programs(wide, narrow, inputs)
        except CannotFollow as no:
            raise _not_followed(no) from no
    for whole, other, part, other_part in zip_longest(*map(_calls, programs)):
        _compare(whole, other, part, other_part)


def _programs(wide: Planned, narrow: Planned, inputs: Inputs | None) -> tuple[Graph, Graph, Graph, Graph]:
    return (
        follow(wide[0], inputs, SMALL),
        follow(narrow[0], inputs, SMALL),
        _of_rank(*wide, inputs),
        _of_rank(*narrow, inputs),
    )


def _of_rank(module: nn.Module, plan: ShardPlan, inputs: Inputs | None) -> Graph:
    """Trace a rank's shard."""
    shards = shards_of(module, plan)
    modules = dict(plan.modules)
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, Conv1D):  # it computes with its size attribute, which sharding changes
            what = plan.modules.get(path, ModuleShard())
            own = {"nf": shards[f"{path}.weight"].local_shape(plan.degree)[1]}
            modules[path] = what.model_copy(update={"attributes": {**what.attributes, **own}})
    with one_rank(module, plan.model_copy(update={"modules": modules})):
        return follow(module, inputs, SMALL, shards=modules, degree=plan.degree)


def _not_followed(no: CannotFollow) -> Difference:
    return Difference(
        f"{no.module or 'the model'} fails on a rank's slices, or cannot be followed ({no.text})",
        "code that computes with whatever sizes its weights have",
    )


def _compare(whole: _Call | None, narrow: _Call | None, part: _Call | None, narrow_part: _Call | None) -> None:
    """Compare one call of each program."""
    if whole is None or narrow is None or not _alike(whole, narrow):
        _refuse(narrow, whole, "the narrow model")
    if part is None or (whole[0].op, _kinds(whole[0])) != (part[0].op, _kinds(part[0])):
        _refuse(part, whole, "a rank's part")
    if narrow_part is None or not _alike(part, narrow_part):
        _refuse(narrow_part, part, "a rank's part of the narrow model")
    _check_share((whole[0], part[0]), (narrow[0], narrow_part[0]))


def _calls(graph: Graph) -> Iterator[_Call]:
    """Yield the calls of a program, without copies that torch may omit."""
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


def _alike(one: _Call, other: _Call) -> bool:
    """Return whether two calls are the same but for sizes."""
    return (
        (one[0].op, one[0].module) == (other[0].op, other[0].module)
        and _kinds(one[0]) == _kinds(other[0])
        and _same_but_sizes(one[1], other[1])
    )


def _kinds(node: Node) -> list[object]:
    """Return the number of dimensions of each output, and whether it is floating-point."""
    return [(len(value.shape), value.floating) if value else None for value in node.outputs]


def _same_but_sizes(one: object, other: object) -> bool:
    """Return whether arguments are equal, but for smaller integers in the second and floats computed from them."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_but_sizes, one, other))
    if type(one) is int and type(other) is int:
        return one == other or one > other > 0
    if isinstance(one, float) and isinstance(other, float):
        return True
    return one == other


def _refuse(actual: _Call | None, expected: _Call | None, who: str) -> NoReturn:
    raise Difference(f"{who} runs {_named(actual)} where {_named(expected)} should run", _SAME)


def _named(call: _Call | None) -> str:
    return f"{call[0].op} in {call[0].module or 'the model itself'}" if call else "nothing"


def _check_share(wide: tuple[Node, Node], narrow: tuple[Node, Node]) -> None:
    """Check that a rank's share of an operator's output is the same in both models, in each dimension."""
    for values in zip(*(node.outputs for node in (*wide, *narrow)), strict=True):
        shapes = [value.shape for value in values if value]
        for whole, part, other, other_part in zip(*shapes, strict=True):
            if whole * other_part != other * part:
                raise Difference(
                    f"{wide[0].op} in {wide[0].module or 'the model itself'} makes {part} of {whole} on a rank, in the "
                    f"narrow model {other_part} of {other}",
                    "the same share: a size stands in the code that is no attribute of the module",
                )
