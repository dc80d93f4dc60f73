"""Rules of elementwise operators, and of those that create or copy tensors."""

from dryfit.parallel.planning.axes import Obstacle, Reason
from dryfit.parallel.planning.rules.base import Partial, Step, rule
from dryfit.parallel.trace.graph import ENTER, LEAVE

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
