"""Kinds of operators, each of which takes time by one formula, and the sizes that the formula needs."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from dryfit.settings.memory_terms import StepPhase
from dryfit.settings.older_python import StrEnum


class Kind(StrEnum):
    """What an operator's time depends on."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    ELEMENTWISE = "element-wise"
    OPTIMIZER = "optimizer"
    CAST = "cast"
    REDUCE = "reduce"
    SOFTMAX = "softmax"
    SOFTMAX_BACKWARD = "softmax backward"
    LOG_SOFTMAX = "log-softmax"
    COPY = "copy"
    STRIDED = "broadcast or strided"
    NORM = "norm"
    NORM_BACKWARD = "norm backward"
    GATHER = "gather"
    EMBEDDING_BACKWARD = "embedding backward"
    VIEW = "view"
    """Only the host works."""


_NAMED: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("aten::_softmax", "aten::_safe_softmax"), Kind.SOFTMAX),
    "aten::_softmax_backward_data": Kind.SOFTMAX_BACKWARD,
    **dict.fromkeys(("aten::_log_softmax", "aten::_log_softmax_backward_data"), Kind.LOG_SOFTMAX),
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss_backward"), Kind.LOG_SOFTMAX),
    **dict.fromkeys(
        ("aten::cat", "aten::stack", "aten::clone", "aten::copy_", "aten::constant_pad_nd", "aten::roll", "aten::flip"),
        Kind.COPY,
    ),
    **dict.fromkeys(
        ("aten::embedding_dense_backward", "aten::index_add_", "aten::scatter_add_"), Kind.EMBEDDING_BACKWARD
    ),
    **dict.fromkeys(
        (
            *("aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take", "aten::scatter"),
            *("aten::scatter_", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_"),
            *("aten::index_copy_", "aten::sort", "aten::topk", "aten::masked_select"),
        ),
        Kind.GATHER,
    ),
}
_REDUCES: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "norm", "prod"),
        *("linalg_vector_norm", "cumsum", "logsumexp", "any", "all", "count_nonzero"),
    )
)
_LISTS: Final = ("aten::_foreach_", "aten::_fused_")
_NORM: Final = "norm"


def kind_of(name: str, flops: int, named: Mapping[str, Any], out: Any, phase: StepPhase) -> Kind:
    """Return the kind of an operator.

    Args:
        name: Of its schema, ``aten::mm``.
        flops: As :func:`dryfit.gpu.work.flops_of` counts them.
        named: Its arguments by name.
        out: What it gave.
        phase: What the script is doing.
    """
    if "convolution" in name:
        return Kind.CONVOLUTION
    if "attention" in name:
        return Kind.ATTENTION
    if flops:
        return Kind.MATMUL
    if name in _NAMED:
        return _NAMED[name]
    if phase is StepPhase.OPTIMIZER and name.startswith(_LISTS):
        return Kind.OPTIMIZER
    if name in _REDUCES or name == "aten::_foreach_norm":
        return Kind.REDUCE
    if _NORM in name:
        return Kind.NORM_BACKWARD if "backward" in name else Kind.NORM
    inputs = [value for value in named.values() if isinstance(value, torch.Tensor)]
    if name == "aten::_to_copy":
        return Kind.CAST if isinstance(out, torch.Tensor) and out.dtype != inputs[0].dtype else Kind.COPY
    if isinstance(out, torch.Tensor) and any(_is_strided(one, out) for one in inputs if one.dim()):
        return Kind.STRIDED
    return Kind.ELEMENTWISE


def _is_strided(tensor: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a kernel reads a tensor in another order than it writes, or some elements more than once."""
    return tensor.numel() != out.numel() or (tensor.layout is torch.strided and tensor.stride() != out.stride())


def sizes_of(kind: Kind, named: Mapping[str, Any], out: Any) -> tuple[int, ...]:
    """Return the sizes that a formula needs.

    Returns:
        Of a matrix product or a convolution, as the product it is computed as: products, rows, columns, terms of each
        sum, groups of a convolution (0: none). Of attention: products of batch and heads, queries, keys, width of a
        head. Else nothing.
    """
    tensors = [value for value in named.values() if isinstance(value, torch.Tensor) and value.dim() >= 2]
    match kind:
        case Kind.MATMUL if len(tensors) >= 2:
            return _product_sizes(tensors, out)
        case Kind.ATTENTION if "query" in named and "key" in named:
            query, key = named["query"], named["key"]
            if most := named.get("max_q"):  # heads are the last dimension but one, rows may have other lengths
                return (query.numel() // query.shape[-1] // most, most, named.get("max_k") or most, query.shape[-1])
            return (prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1])
        case Kind.CONVOLUTION:
            return _convolution_sizes(named, out)
        case _:
            return ()


def _product_sizes(tensors: Sequence[torch.Tensor], out: Any) -> tuple[int, ...]:
    made = out if isinstance(out, torch.Tensor) else tensors[-1]
    if made.dim() < 2:
        return ()
    rows, columns = made.shape[-2], made.shape[-1]
    batch = prod(made.shape[:-2])
    left = tensors[-2]
    if tensors[-1].dim() == 2 and left.dim() >= 2:  # `linear` and products with one matrix: one product of all rows
        batch, rows = 1, batch * rows
    return (batch, rows, columns, left.shape[-1], 0)


def _convolution_sizes(named: Mapping[str, Any], out: Any) -> tuple[int, ...]:
    """Return a convolution as a product: places by channels out by channels in and kernel, a group at a time."""
    weight = named.get("weight")
    made = named.get("grad_output") if named.get("grad_output") is not None else out
    if not isinstance(weight, torch.Tensor) or not isinstance(made, torch.Tensor) or made.dim() < 3:
        return ()
    groups = max(1, named.get("groups") or 1)
    places = made.shape[0] * prod(made.shape[2:])
    return (groups, places, max(1, made.shape[1] // groups), prod(weight.shape[1:]), groups)
