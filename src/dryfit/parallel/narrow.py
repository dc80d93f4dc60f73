"""Make configs of narrower models of the same class, step by step, that are sharded in the same way.

A narrow model has the layers of the wide one, with fewer words, fewer features and fewer heads. The features of a head,
the number of query heads that share keys, and the number of experts stay. Every size that shrinks keeps its remainder
by the degree: what the degree divides in one of the models, it divides in the other.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from math import lcm
from typing import Any, Final, NoReturn, TypeAlias

import torch
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dryfit.parallel.apply import check_plan, shards_of
from dryfit.parallel.capture import SMALL, CannotFollow, Inputs, follow, shortened
from dryfit.parallel.graph import Arg, Graph, Node, Ref
from dryfit.parallel.planner import one_rank
from dryfit.parallel.prove import MAX_PROOF_BYTES, proof_bytes, prove
from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import ModuleShard, ParameterShard, ShardPlan, ShardProof


class Narrowing(IntEnum):
    """How far a model is narrowed; each step includes those before it."""

    VOCABULARY = 1
    """Fewer words; layers have their full width."""
    FEATURES = 2
    """Fewer features between the two halves of a feed-forward network."""
    HEADS = 3
    """Fewer heads, at least two for each rank, and a narrower stream between the layers."""
    ONE_HEAD = 4
    """One head for each rank, or one group of heads where queries share keys."""


_WORDS: Final = 512
_FEATURES_OF_EACH: Final = 64
_STREAM: Final = 128
_LANES: Final = 16  # kernels of experts need rows of whole vectors: multiples of it stay multiples
_BETWEEN: Final = (
    "intermediate_size",
    "n_inner",
    "hidden_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""What architectures call the features between the two halves of a feed-forward network."""
_LIKE_THE_STREAM: Final = ("embedding_size", "pooler_hidden_size", "word_embed_proj_dim")
"""Keys that repeat the width of the stream between the layers."""


def narrow_config(config: PreTrainedConfig, degree: int, step: Narrowing) -> PreTrainedConfig:
    """Return a config of the same class whose model is narrower.

    Args:
        config: The wide model's; it is not changed.
        degree: Number of ranks.
        step: How far to go. Sizes under unknown keys stay.
    """
    narrow = copy.deepcopy(config)
    _fewer_words(narrow, degree)
    if step >= Narrowing.FEATURES:
        _fewer_between(narrow, degree)
    if step >= Narrowing.HEADS:
        _fewer_heads(narrow, degree, of_each=2 if step is Narrowing.HEADS else 1)
    return narrow


def sizes_changed(wide: PreTrainedConfig, narrow: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return the sizes that differ, by key: (wide, narrow). Ids of tokens are no sizes."""
    before, after = wide.to_dict(), narrow.to_dict()
    return {
        key: (value, after[key])
        for key, value in sorted(before.items())
        if type(value) is int and type(after.get(key)) is int and after[key] != value and not key.endswith("_token_id")
    }


def _fewer_words(config: Any, degree: int) -> None:
    rows = _size_of(config, "vocab_size")
    if rows is None or (fewer := _smaller(rows, _WORDS, _LANES * degree)) == rows:
        return
    config.vocab_size = fewer
    for key, value in vars(config).items():
        if not key.endswith("_token_id"):
            continue
        if type(value) is int and value >= fewer:  # it would lie outside the table
            setattr(config, key, 0)
        elif isinstance(value, list):
            setattr(config, key, [0 if type(one) is int and one >= fewer else one for one in value])


def _fewer_between(config: Any, degree: int) -> None:
    for key in _BETWEEN:
        features = _size_of(config, key)
        if (
            key == "n_inner"
            and features is None
            and hasattr(config, key)
            and (stream := _size_of(config, "hidden_size"))
        ):
            features = 4 * stream  # GPT-2's own default
        if features is not None:
            fewer = _smaller(features, _FEATURES_OF_EACH * degree, _LANES * degree)
            if fewer != features:
                setattr(config, key, fewer)


def _fewer_heads(config: Any, degree: int, *, of_each: int) -> None:
    stream, heads = _size_of(config, "hidden_size"), _size_of(config, "num_attention_heads")
    if stream is None or heads is None or stream % heads:
        return
    shared = _size_of(config, "num_key_value_heads")
    groups = shared or heads
    if heads % groups:
        return
    fewer = _smaller(groups, of_each * degree, degree)
    narrow_heads = fewer * (heads // groups)
    if _size_of(config, "head_dim") is None:
        width = narrow_heads * (stream // heads)
    else:  # the stream has a width of its own
        width = _narrow_stream(stream, narrow_heads, degree)
    config.num_attention_heads = narrow_heads
    if shared is not None:
        config.num_key_value_heads = fewer
    config.hidden_size = width
    for key in _LIKE_THE_STREAM:
        if _size_of(config, key) == stream:
            setattr(config, key, width)


def _narrow_stream(stream: int, heads: int, degree: int) -> int:
    """Return a width that the heads divide, as configs require, with the wide one's remainder by the degree."""
    step = lcm(heads, _LANES)
    begin = step * -(-_STREAM // step)
    return next((size for size in range(begin, stream, step) if size % degree == stream % degree), stream)


def _smaller(size: int, least: int, step: int) -> int:
    """Return the smallest number from ``least`` on with the same remainder by a step, at most the number itself."""
    return min(size, least + (size - least) % step)


def _size_of(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value if type(value) is int and value > 0 else None


# Prove the plan of a model that is too wide to be proved itself, on a narrower model of the same class.
#
# The wide model's plan is proved with smaller sizes; no new plan is made. Both models are traced, whole and as one
# rank's shard: they must run the same operators on the same tensors, and shard every tensor in the same dimensions.
#
# The traces are of tensors without values. A rank must hold the same share of every operator's output in both models.


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


@dataclass(frozen=True, slots=True)
class WideModel:
    """A model that is too wide to be proved.

    Attributes:
        module: The model, on the meta device or with weights.
        plan: Its plan.
        inputs: Inputs without values, for tracing; the narrow model gets the same.
    """

    module: nn.Module
    plan: ShardPlan
    inputs: Inputs | None = None

    def refused(self, problem: str, allowed: str) -> ShardError:
        """Return the error for a plan that cannot be proved so."""
        return ShardError(
            f"proving on a narrower model how a {type(self.module).__name__} is sharded over {self.plan.degree} ranks",
            problem,
            allowed,
            "allow the proof more memory, so that the model itself can be proved, or leave execution.tp out",
        )


def prove_plan(
    wide: WideModel,
    narrower: Callable[[Narrowing], nn.Module],
    sample: Callable[[nn.Module], Mapping[str, Any]],
    *,
    most_bytes: int = MAX_PROOF_BYTES,
) -> ShardProof:
    """Prove a plan on its model, or where that takes too much memory, by :func:`prove_narrowed`."""
    if proof_bytes(wide.module, wide.plan) <= most_bytes:
        return prove(wide.module, wide.plan, sample(wide.module), most_bytes=most_bytes)
    return prove_narrowed(wide, narrower, sample, most_bytes=most_bytes)


def random_tokens(name: str, size: Sequence[int], words: int, generator: torch.Generator) -> torch.Tensor:
    """Return values of an input of this name: tokens without padding, all in the first segment."""
    if "mask" in name or "type" in name:
        return torch.full(tuple(size), int("mask" in name))
    return torch.randint(min(5, words - 1), words, tuple(size), generator=generator)


def prove_narrowed(
    wide: WideModel,
    narrower: Callable[[Narrowing], nn.Module],
    sample: Callable[[nn.Module], Mapping[str, Any]],
    *,
    most_bytes: int = MAX_PROOF_BYTES,
) -> ShardProof:
    """Prove a plan on the widest of some narrower models for which the memory suffices.

    Args:
        wide: The model with its plan.
        narrower: Builds a narrower model of the same class on the meta device, with head and adapters, from
            :func:`~dryfit.parallel.narrow.narrow_config`.
        sample: Returns inputs with values for a narrow model.
        most_bytes: Memory that the proof may take.

    Returns:
        The proof of the narrow model; ``narrowed`` says how narrow it was.

    Raises:
        ShardError: See :func:`prove_on`; or none of the models is narrow enough.
    """
    needed = proof_bytes(wide.module, wide.plan)
    for step in Narrowing:
        narrow = narrower(step)
        plan = carried_over(wide, narrow)
        needed = min(needed, proof_bytes(narrow, plan))
        if needed <= most_bytes:
            return prove_on(wide, narrow, sample(narrow), most_bytes=most_bytes)
    raise wide.refused(
        f"the narrowest model of its class that is known how to make takes about {needed / 2**30:.1f} GiB to prove",
        f"{most_bytes / 2**30:.1f} GiB",
    )


def prove_on(
    wide: WideModel, narrow: nn.Module, sample: Mapping[str, Any], *, most_bytes: int = MAX_PROOF_BYTES
) -> ShardProof:
    """Prove a plan on one narrower model; see :func:`dryfit.parallel.prove.prove` for what is compared.

    Raises:
        ShardError: The narrow model has other parameters or modules than the wide one, or runs other operators; it is
            not narrower; a tensor is sharded in one of them only; the proof on the narrow model fails. The first
            parameter or module is named.
    """
    check_plan(wide.module, wide.plan)
    plan = carried_over(wide, narrow)
    sizes = _sizes(wide.module, narrow)
    if not sizes:
        raise wide.refused("the other model is not narrower", "a model whose config has smaller sizes")
    try:
        check_same_program((wide.module, wide.plan), (narrow, plan), wide.inputs)
    except Difference as difference:
        raise wide.refused(str(difference), difference.allowed) from difference
    proof = prove(narrow, plan, sample, most_bytes=most_bytes)
    return proof.model_copy(update={"narrowed": sizes})


def carried_over(wide: WideModel, narrow: nn.Module) -> ShardPlan:
    """Return a wide model's plan with the sizes of a narrow model.

    Blocks and modules' size attributes shrink with the parameters and modules; dimensions, the number of blocks, units,
    boundaries and everything else stay.

    Raises:
        ShardError: A parameter or module is missing, is tied or made otherwise, or cannot be sharded in the same way.
    """
    _check_same_names(wide, narrow)
    shards = shards_of(wide.module, wide.plan)
    shapes = {name: tuple(one.shape) for name, one in narrow.named_parameters(remove_duplicate=False)}
    parameters = {name: _carried(wide, name, shards[name], shape) for name, shape in shapes.items()}
    before, after = _modules(wide.module), _modules(narrow)
    modules: dict[str, ModuleShard] = {}
    for path, what in wide.plan.modules.items():
        numbers = {
            name: _number(wide, f"{path}.{name}", value, getattr(before[path], name), getattr(after[path], name, None))
            for name, value in what.attributes.items()
        }
        modules[path] = what.model_copy(update={"attributes": numbers})
    try:
        return ShardPlan(
            degree=wide.plan.degree,
            parameters=parameters,
            modules=modules,
            whole=wide.plan.whole,
            scores=wide.plan.scores,
        )
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise wide.refused(
            f"of the narrow model {message}", "sizes that can be sharded as the wide model's are"
        ) from error


def _check_same_names(wide: WideModel, narrow: nn.Module) -> None:
    allowed = "a model with the same parameters and modules, only narrower"
    for before, after in zip_longest(_ties(wide.module).items(), _ties(narrow).items()):
        if before is None or after is None or before[0] != after[0]:
            raise wide.refused(f"the narrow model has {_of(after)} where the wide one has {_of(before)}", allowed)
        if before[1] != after[1]:
            raise wide.refused(f"{before[0]} is tied to {after[1]}, in the wide model to {before[1]}", allowed)
    for before, after in zip_longest(_modules(wide.module).items(), _modules(narrow).items()):
        if before is None or after is None or before[0] != after[0]:
            raise wide.refused(f"the narrow model has {_of(after)} where the wide one has {_of(before)}", allowed)
        if type(before[1]) is not type(after[1]):
            names = type(after[1]).__name__, type(before[1]).__name__
            raise wide.refused(f"{before[0]} is a {names[0]}, in the wide model a {names[1]}", allowed)


def _ties(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by every name."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_modules(remove_duplicate=False))


def _of(named: tuple[str, object] | None) -> str:
    return (named[0] or "the model itself") if named else "nothing"


def _carried(wide: WideModel, name: str, shard: ParameterShard, shape: tuple[int, ...]) -> ParameterShard:
    """Return a parameter's row with the sizes of the narrow one; the row's class is kept."""
    if len(shape) != len(shard.shape) or any(new > old for new, old in zip(shape, shard.shape, strict=True)):
        raise wide.refused(f"{name} is {list(shape)}, in the wide model {list(shard.shape)}", "a smaller one")
    if shard.dim is None:
        return shard.model_copy(update={"shape": shape})
    new, old = shape[shard.dim], shard.shape[shard.dim]
    blocks = tuple(block * new // old for block in shard.blocks)
    if any(block * new % old for block in shard.blocks) or any(block % shard.unit for block in blocks):
        raise wide.refused(
            f"{name} is sharded in blocks of {list(shard.blocks)} by units of {shard.unit}, and the narrow one has "
            f"{new} of {old}",
            "as many blocks, in the same units",
        )
    return shard.model_copy(update={"shape": shape, "blocks": blocks})


def _number(wide: WideModel, name: str, on_rank: int, before: int, after: int | None) -> int:
    degree = wide.plan.degree
    if type(after) is int and on_rank == before:
        return after
    if type(after) is int and on_rank * degree == before and after % degree == 0:
        return after // degree
    raise wide.refused(
        f"{name} is {on_rank} of {before} on a rank, and the narrow model has {after}",
        f"all of it, or the same share of what {degree} divides",
    )


def _sizes(module: nn.Module, narrow: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the config keys that became smaller, with their model's path where there are several models."""
    after = _modules(narrow)
    changed: list[tuple[str, dict[str, tuple[int, int]]]] = []
    for path, part in module.named_modules():
        other = after[path]
        if isinstance(part, PreTrainedModel) and isinstance(other, PreTrainedModel):
            sizes = sizes_changed(part.config, other.config)
            if sizes not in (known for _, known in changed):
                changed.append((path, sizes))
    changed = [(path, sizes) for path, sizes in changed if sizes]
    if len(changed) == 1:
        return changed[0][1]
    return {f"{path}: {key}": size for path, sizes in changed for key, size in sizes.items()}
