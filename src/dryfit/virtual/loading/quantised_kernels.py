"""What bitsandbytes' 8-bit kernels give on fakes, where the library's own fakes ask for a size that values decide.

LLM.int8() multiplies in 16 bits the few columns of an input in which a value reaches 6.0 (of the models that its paper
measures, at most seven of thousands: https://arxiv.org/abs/2208.07339, section 3.3). Here there are none.
"""

from typing import Any

import torch


def install(_bitsandbytes: Any) -> None:
    """Let the 8-bit kernels find no outliers in fakes."""
    torch.library.register_fake("bitsandbytes::int8_vectorwise_quant", _by_row)
    torch.library.register_fake("bitsandbytes::int8_double_quant", _by_row_and_column)
    torch.library.register_fake("bitsandbytes::int8_mixed_scaled_mm", _product)


def _by_row(input_: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scales = input_.new_empty(input_.numel() // input_.shape[-1], dtype=torch.float32)
    return input_.new_empty(input_.shape, dtype=torch.int8), scales, _no_columns(input_) if threshold else None


def _by_row_and_column(input_: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor | None, ...]:
    rows, row_scales, outliers = _by_row(input_, threshold)
    columns = input_.new_empty(input_.shape, dtype=torch.int8)
    return rows, columns, row_scales, input_.new_empty(input_.shape[-1], dtype=torch.float32), outliers


def _product(
    input_: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, *_scales: Any, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return input_.new_empty((*codes.shape[:-1], weight.shape[0])), input_.new_empty(0)


def _no_columns(input_: torch.Tensor) -> torch.Tensor:
    return input_.new_empty(0, dtype=torch.int64)
