"""Floating-point operations of matrix products, convolutions and attention, forward and backward.

The formulas are those that ``torch.utils.flop_counter`` keeps, also for what other libraries register there; here stand
only those that it has not, or not exactly. A multiplication and an addition are two operations.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dryfit.meta.private_apis.torch_modes import schema_of


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating-point operations of an operator: by our formula, else torch's, else none."""
    own = _FORMULAS.get(schema_of(func).name)
    if own is not None:
        return own(*args, **kwargs)
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    # `addmm` and others take the type of their output as well, of which torch's formulas do not know.
    shaped = [one for one in args if not isinstance(one, torch.dtype)]
    return int(formula(*shaped, **kwargs, out_val=out))


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *others: Any, **_: Any) -> int:
    """Return twice the forward's operations, once for each gradient asked for.

    torch's formula counts those of a grouped convolution's weight once for each group.
    """
    transposed, output_mask = others[4], others[7]
    places = (inputs if transposed else gradient).shape
    return 2 * places[0] * prod(places[2:]) * weight.numel() * sum(map(bool, output_mask[:2]))


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the operations of a product by groups (experts): either side may be cut into groups of rows."""
    if left.dim() == 3 and right.dim() == 2:
        return 2 * right.numel() * left.shape[-2]
    return 2 * left.numel() * right.shape[-1]


def _batch_summed(_: Any, left: Any, right: Any, **__: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _linear(inputs: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * inputs.numel() * weight.shape[0]


def _product(left: Any, right: Any) -> int:
    if right.dim() == 1:
        return 2 * left.numel()
    if left.dim() == 1:
        return 2 * right.numel()
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return 2 * prod(batch) * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key.shape[-2] + 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Return the operations of five products: scores again, and the gradients of value, scores, query and key."""
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * scores * (3 * query.shape[-1] + 2 * value.shape[-1])


def _four_bit(inputs: Any, _: Any, weight_shape: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * inputs.numel() * weight_shape[0]


def _eight_bit_and_outliers(inputs: Any, _: Any, weight: Any, *__: Any, **___: Any) -> int:
    return 2 * inputs.numel() * weight.shape[0]


_ATTENTION = ("flash", "efficient", "cudnn")
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::convolution_backward": _convolution_backward,
    "aten::_int_mm": lambda left, right, **_: 2 * left.numel() * right.shape[-1],
    "aten::_addmm_activation": lambda _, left, right, **__: 2 * left.numel() * right.shape[-1],
    "aten::addbmm": _batch_summed,
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    # Whole in inference mode, where no key of autograd takes them apart.
    "aten::linear": _linear,
    "aten::matmul": _product,
    "aten::scaled_dot_product_attention": _attention,
    # Some versions of torch refuse fewer heads of keys than of queries (grouped-query attention).
    **{f"aten::_scaled_dot_product_{kernel}_attention": _attention for kernel in _ATTENTION},
    **{f"aten::_scaled_dot_product_{kernel}_attention_backward": _attention_backward for kernel in _ATTENTION},
    # bitsandbytes' own operators; its other products dequantise, then call torch's.
    "bitsandbytes::gemm_4bit": _four_bit,
    "bitsandbytes::gemv_4bit": _four_bit,
    "bitsandbytes::int8_linear_matmul": _linear,
    "bitsandbytes::int8_scaled_mm": _linear,
    "bitsandbytes::int8_mixed_scaled_mm": _eight_bit_and_outliers,
}
"""Formulas that ``torch.utils.flop_counter`` has not, or not exactly."""


def timed_flops(flops: int, name: str, named: Mapping[str, Any]) -> int:
    """Return the operations that a kernel has to do: of causal attention, each query's with itself and earlier keys.

    Args:
        name: The operator's.
        named: Its arguments by name.
    """
    if not flops or not named.get("is_causal") or "key" not in named or "query" not in named:
        return flops
    queries, keys = named["query"].shape[-2], named["key"].shape[-2]
    if named.get("cum_seq_q") is not None or name.startswith(("aten::_flash", "aten::_efficient")):
        queries, keys = named.get("max_q") or queries, named.get("max_k") or keys
    seen = min(queries, keys)
    return flops * (seen * (seen + 1) // 2 + (queries - seen) * keys) // max(1, queries * keys)
