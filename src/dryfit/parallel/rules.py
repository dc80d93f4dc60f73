"""Rules of operators: which dimensions of their tensors are the same, and what is partial."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dryfit.parallel.axes import Axes, Dim, Obstacle, Reason
from dryfit.parallel.graph import ENTER, LEAVE, Node, Ref, Value

# Rules of operators: functions that return which dimensions of an operator's tensors correspond.


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


# Rules of elementwise operators, and of those that create or copy tensors.


_ANY = (
    "abs ceil clamp clamp_min clamp_max cos elu erf exp expm1 floor gelu hardsigmoid hardswish hardtanh leaky_relu "
    "log log1p log_sigmoid mish reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin softplus sqrt square tanh "
    "pow floor_divide fmod remainder maximum minimum atan2 eq ne ge gt le lt logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ isnan isinf isfinite where "
    "masked_fill addcmul addcdiv lerp bernoulli rand_like randn_like"
)
_FIRST = (
    "neg alias clone contiguous detach dropout native_dropout feature_dropout lift_fresh_copy lift_fresh to type_as "
    "_to_copy positive view_as_real"
)


def _elements(step: Step) -> None:
    step.out(step.broadcast(step.node.refs(), step.made()))


rule(_ANY)(_elements)
rule("add sub", partial=Partial.ALL)(_elements)
rule("mul", partial=Partial.ONE)(_elements)
rule("div", partial=Partial.FIRST)(_elements)


@rule(_FIRST, partial=Partial.FIRST)
def _(step: Step) -> None:
    step.out(step.dims(next(step.node.refs())))


@rule("zeros_like ones_like empty_like full_like")
def _(step: Step) -> None:
    step.out(step.dims(step.node.ref("self")))


@rule("zeros ones empty full new_zeros new_ones new_empty new_full scalar_tensor")
def _(step: Step) -> None:
    """All elements are the same: a slice is such a tensor of a smaller size."""
    step.out(step.fresh(size) for size in step.made())


@rule("arange linspace eye tril_indices triu_indices rand randn")
def _(step: Step) -> None:
    step.out(step.fixed(size, "counts from the beginning of a dimension") for size in step.made())


@rule("tril triu cumsum cumprod flip roll")
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    for dim in dims:
        step.whole(dim)
    step.out(dims)


@rule(ENTER, partial=Partial.FIRST)
def _(step: Step) -> None:
    step.out(step.dims(step.node.ref("x")))


@rule(LEAVE, partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("x"))
    if step.node.name in step.state.opened:
        shape = step.shape(step.node.ref("x"))
        reason = Reason(Obstacle.OUTPUT, f"what {step.node.module} returns is put together from all ranks")
        dims = (*dims[:-1], step.axes.new(shape[-1], reason))
    step.out(dims)


# Rules of matrix products, attention and embeddings: sums over one dimension, partial where that is sharded.


@rule("linear", partial=Partial.ONE)
def _(step: Step) -> None:
    x, weight = step.dims(step.node.ref("input")), step.dims(step.node.ref("weight"))
    bias = step.node.optional("bias")
    step.same(x[-1], weight[-1])
    if bias and weight[:-1]:
        step.same(step.dims(bias)[-1], weight[0])
    step.sum(weight[-1], bias=bias)
    step.out((*x[:-1], *weight[:-1]))


@rule("addmm")
def _(step: Step) -> None:
    one, other, bias = (step.dims(step.node.ref(name)) for name in ("mat1", "mat2", "self"))
    step.same(one[1], other[0])
    made = (one[0], other[1])
    step.stretch_to(bias, made)
    step.sum(one[1], bias=step.node.ref("self"))
    step.out(made)


@rule("matmul mm bmm", partial=Partial.ONE)
def _(step: Step) -> None:
    refs = list(step.node.refs())
    one, other = (step.dims(ref) for ref in refs)
    if len(one) < 2 or len(other) < 2:
        return unknown(step)
    step.same(one[-1], other[-2])
    shape = step.made()
    batch = step.stretched([one[:-2], other[:-2]], len(shape) - 2)
    step.sum(one[-1])
    return step.out((*batch, one[-2], other[-1]))


@rule("baddbmm")
def _(step: Step) -> None:
    one, other = step.dims(step.node.ref("batch1")), step.dims(step.node.ref("batch2"))
    step.same(one[0], other[0])
    step.same(one[2], other[1])
    made = (one[0] or other[0], one[1], other[2])
    step.stretch_to(step.dims(step.node.ref("self")), made)
    # The first tensor would be added to each partial sum; with beta = 0 it is not added.
    if step.node.args.get("beta") == 0:
        step.sum(one[2])
    else:
        step.whole(one[2], "adds something to a product")
    step.out(made)


@rule("grouped_mm _grouped_mm transformers::grouped_mm_fallback")
def _(step: Step) -> None:
    """Rows of several experts, each group with a matrix of its own: (S, K) and (E, K, N) give (S, N)."""
    refs = list(step.node.refs())
    rows, weight = step.dims(refs[0]), step.dims(refs[1])
    if len(rows) != 2 or len(weight) != 3:
        return unknown(step)
    for ref in refs[2:]:
        for dim in step.dims(ref):
            step.whole(dim, "counts the rows of each expert")
    step.whole(rows[0], "groups rows by expert")
    step.whole(weight[0], "groups rows by expert")
    step.same(rows[1], weight[1])
    step.sum(weight[1])
    return step.out((rows[0], weight[2]))


@rule("scaled_dot_product_attention")
def _(step: Step) -> None:
    query, key, value = (step.dims(step.node.ref(name)) for name in ("query", "key", "value"))
    if step.node.args.get("enable_gqa"):
        shape = {name: step.shape(step.node.ref(name)) for name in ("query", "key")}
        repeats = step.fresh(shape["query"][-3] // shape["key"][-3])
        key = (*key[:-3], (*key[-3], *repeats), *key[-2:])
        value = (*value[:-3], (*value[-3], *repeats), *value[-2:])
    batch = step.stretched([query[:-2], key[:-2], value[:-2]], len(query) - 2)
    step.same(query[-1], key[-1])
    step.same(key[-2], value[-2])
    for dim, text in ((query[-1], "scores whole heads"), (key[-2], "has a softmax over the keys")):
        step.whole(dim, text)
    if mask := step.node.optional("attn_mask"):
        step.stretch_to(step.dims(mask), (*batch, query[-2], key[-2]))
    step.out((*batch, query[-2], value[-1]))


@rule("embedding")
def _(step: Step) -> None:
    """One row for each id; where rows are sharded, a rank has zeros for the ids of others."""
    weight: Ref = step.node.ref("weight")
    table, ids = step.dims(weight), step.dims(step.node.ref("indices"))
    if step.node.args.get("sparse"):
        return unknown(step)
    step.sum(table[0], SumKind.LOOKUP, weight=weight)
    return step.out((*ids, table[1]))


# Rules of reductions, normalisations over a dimension, sorting and indexing.


@rule("softmax log_softmax _softmax _log_softmax logcumsumexp")
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    step.whole(dims[positive(step.node.integer("dim"), len(dims))])
    step.out(dims)


@rule("layer_norm rms_norm _fused_rms_norm native_layer_norm")
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("input"))
    count = len(step.node.numbers("normalized_shape"))
    for name in ("weight", "bias"):
        if given := step.node.optional(name):
            for dim, like in zip(step.dims(given), dims[-count:], strict=True):
                step.same(dim, like)
    for dim in dims[-count:]:
        step.whole(dim)
    step.out(dims)
    for item in range(1, len(step.node.outputs)):
        step.out((*dims[:-count], *([()] * count)), item)


def _reduced(step: Step) -> tuple[list[int], list[Dim]]:
    """Return which dimensions are reduced, and the remaining ones."""
    dims = step.dims(step.node.ref("self"))
    given = [positive(dim, len(dims)) for dim in step.node.numbers("dim")] or list(range(len(dims)))
    if step.node.args.get("keepdim"):
        return given, [() if at in given else dim for at, dim in enumerate(dims)]
    return given, [dim for at, dim in enumerate(dims) if at not in given]


@rule("sum", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    given, left = _reduced(step)
    for at in given:
        step.sum(dims[at])
    step.out(left)


@rule("min max")
def _(step: Step) -> None:
    """With a second tensor they work elementwise; else they reduce."""
    if other := step.node.optional("other"):
        step.out(step.broadcast([step.node.ref("self"), other], step.made()))
    else:
        _needs_all(step)


@rule("mean", partial=Partial.FIRST)  # it divides by the size of the dimension
@rule("amax amin var std prod logsumexp argmax argmin any all norm linalg_vector_norm")
def _needs_all(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    given, left = _reduced(step)
    for at in given:
        step.whole(dims[at])
    step.out(left)


@rule("topk sort argsort kthvalue median")
def _(step: Step) -> None:
    dims = list(step.dims(step.node.ref("self")))
    at = positive(step.node.integer("dim", -1), len(dims))
    step.whole(dims[at], "orders the elements of a dimension")
    step.out((*dims[:at], step.fixed(step.made()[at]), *dims[at + 1 :]))


@rule("one_hot")
def _(step: Step) -> None:
    step.out((*step.dims(step.node.ref("self")), step.fixed(step.made()[-1])))


@rule("cross_entropy_loss nll_loss_nd nll_loss")
def _(step: Step) -> None:
    """A loss over classes, the second dimension, and a mean over rows: all of both are needed."""
    reason = step.why("needs the scores of all classes", Obstacle.LOSS)
    for ref in step.node.refs():
        for dim in step.dims(ref):
            step.axes.replicate(dim, reason)
    step.out(step.axes.new(size, reason) for size in step.made())


@rule("gather take_along_dim", partial=Partial.FIRST)
def _(step: Step) -> None:
    first, index = step.node.ref("self"), step.node.ref("index")
    at = positive(step.node.integer("dim"), len(step.dims(first)))
    for place, (dim, like) in enumerate(zip(step.dims(first), step.dims(index), strict=True)):
        if place == at:
            step.whole(dim, "looks up by number")
        elif step.shape(first)[place] == step.shape(index)[place]:
            step.same(dim, like) if dim else None
        else:
            step.whole(dim, "looks at a part of a dimension")
            step.whole(like, "looks at a part of a dimension")
    step.out(step.dims(index))


@rule("index_select", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = list(step.dims(step.node.ref("self")))
    at = positive(step.node.integer("dim"), len(dims))
    step.whole(dims[at], "looks up by number")
    dims[at] = step.dims(step.node.ref("index"))[0]
    step.out(dims)


@rule("index", partial=Partial.FIRST)
def _(step: Step) -> None:
    """As in NumPy: the dimensions of the indices stand where the first of them stood, or first if they lie apart."""
    dims = step.dims(step.node.ref("self"))
    given = step.node.args["indices"]
    indices: list[tuple[int, Ref]] = [
        (at, index) for at, index in enumerate(given if isinstance(given, tuple) else ()) if isinstance(index, Ref)
    ]
    # A mask in the place of numbers makes a tensor whose size depends on values.
    if not indices or len(step.made()) != len(dims) - len(indices) + max(len(step.dims(ref)) for _, ref in indices):
        return unknown(step)
    for at, _ in indices:
        step.whole(dims[at], "looks up by number")
    places = [at for at, _ in indices]
    rank = max(len(step.dims(ref)) for _, ref in indices)
    rest = [dim for at, dim in enumerate(dims) if at not in places]
    together = places == list(range(places[0], places[0] + len(places)))
    before = places[0] if together else 0
    looked = step.broadcast([ref for _, ref in indices], step.made()[before : before + rank])
    return step.out((*rest[:before], *looked, *rest[before:]))


# Where something is written depends on values: only what is whole on each rank may take part.
rule("index_put index_add index_copy scatter scatter_add histc bincount")(unknown)


# Rules of operators that reshape, split, join or slice tensors.


@rule("view reshape _unsafe_view flatten unflatten view_as reshape_as", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    made = step.axes.regroup(dims, step.made())
    if made is None:
        for dim in dims:
            step.whole(dim, "gives a dimension a shape that lies across it")
        made = [step.fixed(size) for size in step.made()]
    step.out(made)


@rule("transpose swapaxes swapdims t mT numpy_T", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = list(step.dims(step.node.ref("self")))
    first = step.node.integer("dim0", step.node.integer("axis0", -2))
    second = step.node.integer("dim1", step.node.integer("axis1", -1))
    if len(dims) > 1:  # the last two, unless others are named; t leaves a vector as it is
        dims[first], dims[second] = dims[second], dims[first]
    step.out(dims)


@rule("permute", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    step.out(dims[positive(dim, len(dims))] for dim in step.node.numbers("dims"))


@rule("movedim", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    sources = [positive(dim, len(dims)) for dim in step.node.numbers("source")]
    targets = [positive(dim, len(dims)) for dim in step.node.numbers("destination")]
    moved = dict(zip(targets, sources, strict=True))
    rest = iter([at for at in range(len(dims)) if at not in sources])
    step.out(dims[moved[at]] if at in moved else dims[next(rest)] for at in range(len(dims)))


@rule("unsqueeze squeeze", partial=Partial.FIRST)
def _(step: Step) -> None:
    """Dimensions of size 1 come and go; the others stay in their order."""
    left = iter([dim for dim in step.dims(step.node.ref("self")) if dim])
    step.out(next(left) if size > 1 else () for size in step.made())


@rule("expand expand_as broadcast_to", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims, shape = step.dims(step.node.ref("self")), step.made()
    old = [()] * (len(shape) - len(dims)) + list(dims)
    made = [dim or step.fresh(size) for dim, size in zip(old, shape, strict=True)]
    if other := step.node.optional("other"):
        for dim, like in zip(made, step.dims(other), strict=True):
            step.same(dim, like) if dim and like else None
    step.out(made)


@rule("repeat", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims, times = step.dims(step.node.ref("self")), step.node.numbers("repeats")
    old: list[Dim] = [()] * (len(times) - len(dims)) + list(dims)
    step.out((*step.fresh(count), *dim) for dim, count in zip(old, times, strict=True))


@rule("repeat_interleave", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims, count = list(step.dims(step.node.ref("self"))), step.node.integer("repeats")
    at = positive(step.node.integer("dim"), len(dims))
    if step.node.optional("repeats") or step.node.args.get("dim") is None:
        for dim in dims:
            step.whole(dim)
        return step.out(step.fixed(size) for size in step.made())
    dims[at] = (*dims[at], *step.fresh(count))
    return step.out(dims)


@rule("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    at = positive(step.node.integer("dim"), len(dims))
    sizes = {step.made(item)[at] for item in range(len(step.node.outputs))}
    part = _part_of(step, dims[at], len(step.node.outputs), sizes)
    for item in range(len(step.node.outputs)):
        inner = part if part is not None else step.fixed(step.made(item)[at])
        step.out((*dims[:at], inner, *dims[at + 1 :]), item)


def _part_of(step: Step, dim: Dim, count: int, sizes: set[int]) -> Dim | None:
    """Return the dimension of one of several equal parts; None where the parts are unequal."""
    if len(sizes) != 1 or step.axes.length(dim) != count * next(iter(sizes)):
        step.whole(dim, "takes a dimension apart in unequal parts")
        return None
    if count == 1:
        return dim
    part = step.fresh(next(iter(sizes)))
    step.same((*step.fixed(count, "takes a dimension apart"), *part), dim)
    return part


@rule("slice narrow", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    at = positive(step.node.integer("dim"), len(dims))
    whole, size = step.shape(step.node.ref("self"))[at], step.made()[at]
    start = step.node.integer("start")
    start += whole if start < 0 else 0
    if size == whole:
        return step.out(dims)
    if step.node.integer("step", 1) != 1 or whole % size or start % size:
        step.whole(dims[at], "takes an uneven part of a dimension")
        return step.out((*dims[:at], step.fixed(size), *dims[at + 1 :]))
    part = _part_of(step, dims[at], whole // size, {size})
    return step.out((*dims[:at], part or (), *dims[at + 1 :]))


@rule("select unbind", partial=Partial.FIRST)
def _(step: Step) -> None:
    dims = step.dims(step.node.ref("self"))
    at = positive(step.node.integer("dim"), len(dims))
    step.whole(dims[at], "takes the elements of a dimension apart")
    step.out((*dims[:at], *dims[at + 1 :]))


@rule("cat concat concatenate", partial=Partial.ALL)
def _(step: Step) -> None:
    refs = [ref for ref in step.node.tensors("tensors") if step.shape(ref) != (0,)]
    shape = step.made()
    at = positive(step.node.integer("dim"), len(shape))
    made = list(step.dims(refs[0]))
    for ref in refs[1:]:
        for place, dim in enumerate(step.dims(ref)):
            if place != at or step.shape(ref)[at] == step.shape(refs[0])[at]:
                step.same(made[place], dim)
    if len(refs) * step.shape(refs[0])[at] == shape[at] and len({step.shape(ref)[at] for ref in refs}) == 1:
        made[at] = (*step.fixed(len(refs), "puts tensors behind each other"), *made[at])
    else:
        for ref in refs:
            step.whole(step.dims(ref)[at], "puts unequal tensors behind each other")
        made[at] = step.fixed(shape[at])
    step.out(made)


@rule("stack", partial=Partial.ALL)
def _(step: Step) -> None:
    refs = step.node.tensors("tensors")
    shape = step.made()
    at = positive(step.node.integer("dim"), len(shape))
    made = list(step.dims(refs[0]))
    for ref in refs[1:]:
        for one, other in zip(made, step.dims(ref), strict=True):
            step.same(one, other)
    made.insert(at, step.fixed(len(refs), "puts tensors beside each other"))
    step.out(made)


@rule("pad constant_pad_nd")
def _(step: Step) -> None:
    first: Ref = step.node.ref("self")
    made: list[Dim] = []
    for dim, old, new in zip(step.dims(first), step.shape(first), step.made(), strict=True):
        if old != new:
            step.whole(dim)
        made.append(dim if old == new else step.fixed(new))
    step.out(made)
