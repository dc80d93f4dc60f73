"""Rules of operators that reshape, split, join or slice tensors."""

from dryfit.parallel.planning.axes import Dim
from dryfit.parallel.planning.rules.base import Partial, Step, positive, rule
from dryfit.parallel.trace.graph import Ref


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
