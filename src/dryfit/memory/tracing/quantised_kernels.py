"""What bitsandbytes' CUDA kernels allocate, on fakes.

The library's own fakes show outputs alone. Here a product with 4-bit weights is the three operators that its kernel
consists of (``backends/cuda/ops.py``, ``_dequant_linear_fallback``): scales, matrix, product. For few tokens (up to 4
always, up to 1 536 by size and device) the library has a kernel that needs no matrix: above 4 this is an upper bound.

LLM.int8() multiplies in 16 bits the few columns of an input in which a value reaches 6.0 (of the models that its paper
measures, at most seven of thousands: https://arxiv.org/abs/2208.07339, section 3.3). Here there are none, and the
product is the two operators of the library's kernel.
"""

from collections.abc import Sequence
from functools import cache

import torch

_FEW_TOKENS = 4


@cache
def install() -> None:
    """Let bitsandbytes' operators allocate on fakes what they do on a CUDA device; it must be imported."""
    # The library's own ask for a number of columns that values decide.
    torch.library.register_fake("bitsandbytes::int8_vectorwise_quant", _by_row, allow_override=True)
    torch.library.register_fake("bitsandbytes::int8_double_quant", _by_row_and_column, allow_override=True)
    # At autograd's place in the dispatcher, which comes before the modes that record: they see the parts.
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("gemm_4bit", _four_bit, "AutogradCUDA")
    library.impl("int8_mixed_scaled_mm", _eight_bit, "AutogradCUDA")
    library.impl("int8_vectorwise_quant", _by_row, "AutogradCUDA")
    _KEPT.append(library)


_KEPT: list[torch.library.Library] = []
"""What is registered lives as long as these."""


def _four_bit(
    input_: torch.Tensor,
    weight: torch.Tensor,
    shape: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    *rest: torch.Tensor | None,
) -> torch.Tensor:
    bias, packed, _, offset = (*rest, None, None, None, None)[:4]
    if input_.numel() <= _FEW_TOKENS * input_.shape[-1]:
        return input_.new_empty((*input_.shape[:-1], shape[0]))
    scales = absmax
    if packed is not None and offset is not None:
        scales = torch.empty_like(packed, dtype=torch.float32)
        scales = scales + offset
    matrix = torch.ops.bitsandbytes.dequantize_4bit.default(weight, scales, blocksize, quant_type, shape, input_.dtype)
    return torch.nn.functional.linear(input_, matrix, bias)


def _eight_bit(
    input_: torch.Tensor,
    codes: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    integers = torch.ops.bitsandbytes.int8_linear_matmul.default(codes, weight)
    product = torch.ops.bitsandbytes.int8_mm_dequant.default(integers, row_scales, column_scales, bias=bias)
    return product.to(input_.dtype), input_.new_empty(0)


def _by_row(input_: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scales = input_.new_empty(input_.numel() // input_.shape[-1], dtype=torch.float32)
    codes = input_.new_empty(input_.shape, dtype=torch.int8)
    if not threshold:
        return codes, scales, None
    outliers = input_.abs() >= threshold
    del outliers  # held until the columns are known
    return codes, scales, input_.new_empty(0, dtype=torch.int64)


def _by_row_and_column(input_: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor | None, ...]:
    rows, row_scales, outliers = _by_row(input_, threshold)
    columns = input_.new_empty(input_.shape, dtype=torch.int8)
    return rows, columns, row_scales, input_.new_empty(input_.shape[-1], dtype=torch.float32), outliers
