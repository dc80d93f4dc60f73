"""Rules of matrix products, attention and embeddings: sums over one dimension, partial where that is sharded."""

from dryfit.parallel.planning.rules.base import Partial, Step, SumKind, rule, unknown
from dryfit.parallel.trace.graph import Ref


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
