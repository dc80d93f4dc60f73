"""Rules of reductions, normalisations over a dimension, sorting and indexing."""

from dryfit.parallel.planning.axes import Dim, Obstacle
from dryfit.parallel.planning.rules.base import Partial, Step, positive, rule, unknown
from dryfit.parallel.trace.graph import Ref


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
