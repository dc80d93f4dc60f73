"""Kinds of operators, each of which takes time by one formula, and the sizes that the formula needs."""

from collections.abc import Mapping
from math import ceil, prod
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
    HOST_COPY = "copies to and from the host"
    COLLECTIVE = "collectives"
    """What computing does not hide of them."""


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
_COPIES: Final = ("aten::copy_", "aten::_to_copy")
_LEFT: Final = ("mat1", "batch1", "input", "self", "A")
_RIGHT: Final = ("mat2", "batch2", "weight", "other", "B")
_OF_ONE_KERNEL: Final = ("aten::_flash_attention", "aten::_efficient_attention")


def kind_of(name: str, flops: int, named: Mapping[str, Any], out: Any, phase: StepPhase) -> Kind:
    """Return the kind of an operator.

    Args:
        name: Of its schema, ``aten::mm``.
        flops: As :func:`dryfit.gpu.work.flops_of` counts them.
        named: Its arguments by name.
        out: What it gave.
        phase: What the script is doing.
    """
    if "c10d" in name:  # what is sent is timed apart
        return Kind.VIEW
    if "convolution" in name:
        return Kind.CONVOLUTION
    if "attention" in name:
        return Kind.ATTENTION
    if flops:
        return Kind.MATMUL
    if name in _NAMED and name not in _COPIES:
        return _NAMED[name]
    if phase is StepPhase.OPTIMIZER and name.startswith(_LISTS):
        return Kind.OPTIMIZER
    if name in _REDUCES or name == "aten::_foreach_norm":
        return Kind.REDUCE
    if _NORM in name:
        return Kind.NORM_BACKWARD if "backward" in name else Kind.NORM
    inputs = [value for value in named.values() if isinstance(value, torch.Tensor)]
    if name in _COPIES and len({one.device.type for one in (*inputs, out) if isinstance(one, torch.Tensor)}) > 1:
        return Kind.HOST_COPY
    if name == "aten::copy_":
        return Kind.COPY
    if name == "aten::_to_copy":
        return Kind.CAST if isinstance(out, torch.Tensor) and out.dtype != inputs[0].dtype else Kind.COPY
    if isinstance(out, torch.Tensor) and any(_is_strided(one, out) for one in inputs if one.dim()):
        return Kind.STRIDED
    return Kind.ELEMENTWISE


def _is_strided(tensor: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a kernel reads a tensor in another order than it writes, or some elements more than once."""
    return tensor.numel() != out.numel() or (tensor.layout is torch.strided and tensor.stride() != out.stride())


def sizes_of(kind: Kind, name: str, named: Mapping[str, Any], out: Any, flops: int) -> tuple[int, ...]:
    """Return the sizes that a formula needs.

    Args:
        name: The operator's.
        flops: As everybody counts them; two for each term of a product's sums.

    Returns:
        Of a matrix product or a convolution, as the product it is computed as: products, rows, columns, terms of each
        sum, groups of a convolution (0: none). Of attention: products of batch and heads, queries, keys, width of a
        head. Else nothing.
    """
    match kind:
        case Kind.MATMUL:
            return _product_sizes(named, out, flops)
        case Kind.ATTENTION if "query" in named and "key" in named:
            return attention_sizes(name, named)
        case Kind.CONVOLUTION:
            return _convolution_sizes(named, out)
        case _:
            return ()


def attention_sizes(name: str, named: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return products of batch and heads, queries, keys and width; of packed rows their mean lengths.

    Operators of one kernel have the heads behind the rows, unlike torch's ``scaled_dot_product_attention``. Packed rows
    stand one behind the other, and a tensor of one more than their number says where each begins.
    """
    query, key = named["query"], named["key"]
    if not name.startswith(_OF_ONE_KERNEL):
        return (prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1])
    starts = named.get("cum_seq_q", named.get("cu_seqlens_q"))
    rows = prod(query.shape[:-3]) if starts is None else max(1, starts.numel() - 1)
    queries, keys = (query.shape[-3], key.shape[-3])
    if starts is not None:
        queries, keys = ceil(queries / rows), ceil(keys / rows)
    return (rows * query.shape[-2], queries, keys, query.shape[-1])


def _product_sizes(named: Mapping[str, Any], out: Any, flops: int) -> tuple[int, ...]:
    """Return a product's sizes by its result; its terms by the operations, whatever shapes its matrices are kept in."""
    left, right = (next((named[name] for name in names if name in named), None) for names in (_LEFT, _RIGHT))
    if not isinstance(out, torch.Tensor) or out.dim() < 2 or not out.numel():
        return ()
    batch, rows, columns = prod(out.shape[:-2]), out.shape[-2], out.shape[-1]
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dim() == out.dim() and right.dim() == 2:  # `linear`: one product of all rows
            batch, rows = 1, batch * rows
        elif out.dim() == 2 and 3 in (left.dim(), right.dim()):  # by groups of rows, or of columns
            batch = max(left.shape[0] if left.dim() == 3 else 0, right.shape[0] if right.dim() == 3 else 0)
            rows, columns = (ceil(rows / batch), columns) if right.dim() == 3 else (rows, ceil(columns / batch))
    return (batch, rows, columns, max(1, round(flops / (2 * batch * rows * columns))), 0)


def _convolution_sizes(named: Mapping[str, Any], out: Any) -> tuple[int, ...]:
    """Return a convolution as a product: places by channels out by channels in and kernel, a group at a time.

    A transposed one is the product that gives a convolution's gradient of its input: each place in by channels out
    and kernel.
    """
    weight, groups = named.get("weight"), max(1, named.get("groups") or 1)
    made = named.get("grad_output") if named.get("grad_output") is not None else out
    if not isinstance(weight, torch.Tensor) or not isinstance(made, torch.Tensor) or made.dim() < 3:
        return ()
    if named.get("transposed"):
        places = named["input"].shape
        terms = weight.shape[0] // groups
        return (groups, places[0] * prod(places[2:]), prod(weight.shape[1:]), max(1, terms), groups)
    places = made.shape[0] * prod(made.shape[2:])
    return (groups, places, max(1, made.shape[1] // groups), prod(weight.shape[1:]), groups)
