"""Scratch memory of CUDA kernels, which no operator's output shows.

Formulas follow the kernels' sources in ``aten/src/ATen/native``; each names its file. They hold for dense,
contiguous inputs. Kernels free it before their operator returns.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_FP32_BYTES = 4
_INT64_BYTES = 8
_FLASH_ROWS = 128
_FLASH_WIDTH = 32
_WARP = 32
_ROWS_OF_PART = 10
_MULTIPROCESSORS = 108

GEMMS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._addmm_activation.default,
    }
)
"""Operators that call cuBLAS, which takes its workspace at the first call."""


def workspace_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the scratch bytes of an operator's CUDA kernel; 0 where none are known.

    Args:
        func: The operator's overload.
        args: Its arguments.
        out: Its result.
    """
    formula = _FORMULAS.get(func)
    return formula(args, out) if formula is not None else 0


def _flash_backward(args: tuple[Any, ...], _out: Any) -> int:
    # flash_attn/flash_api.cpp, mha_bwd: softmax_d (B, H, rounded L) and, as the key's length is split over blocks,
    # dq_accum (B, H, rounded L, rounded D) in fp32. Deterministic mode takes more.
    query = args[1]
    rows, heads, length, width = query.shape
    rounded_length = math.ceil(length / _FLASH_ROWS) * _FLASH_ROWS
    rounded_width = math.ceil(width / _FLASH_WIDTH) * _FLASH_WIDTH
    return rows * heads * rounded_length * (rounded_width + 1) * _FP32_BYTES


def _efficient_backward(args: tuple[Any, ...], _out: Any) -> int:
    # transformers/cuda/attention_backward.cu, _efficient_attention_backward: delta (B, H, L) in fp32, and the
    # accumulators of dq, dk and dv in fp32 where the outputs are in half precision and a block cannot hold them
    # (heads wider than 128).
    query, key = args[1], args[2]
    rows, heads, length, width = query.shape
    delta = rows * heads * length * _FP32_BYTES
    if query.dtype is torch.float32 or width <= 128:
        return delta
    return delta + rows * heads * width * (length + 2 * key.shape[2]) * _FP32_BYTES


def _embedding_backward(args: tuple[Any, ...], _out: Any) -> int:
    # cuda/Embedding.cu, embedding_dense_backward_cuda, and cuda/EmbeddingBackwardKernel.cu: above 3072 indices, these
    # are sorted (copies of indices and positions remain), and the rows of a segment of equal indices are summed by
    # tens, in fp32. How many segments there are is not asked: there is room for as many as indices or rows.
    gradient, indices, rows = args[:3]
    count = indices.numel()
    if count <= 3072:
        return 0
    segments = min(count, rows)
    parts = count // _ROWS_OF_PART + segments
    width = math.ceil(gradient.shape[-1] / _WARP) * _WARP
    return parts * (width * _FP32_BYTES + _INT64_BYTES) + (2 * count + 3 * segments) * _INT64_BYTES


def _layer_norm_backward(args: tuple[Any, ...], _out: Any) -> int:
    # cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: many narrow rows are summed in blocks of 32 rows, at
    # most 32768 blocks in all; narrow is less than half as many warps as multiprocessors (108 or more).
    width = math.prod(args[2])
    rows = args[1].numel() // max(1, width)
    if rows <= 64 * 1024 or width // _WARP >= _MULTIPROCESSORS // 2:
        return 0
    blocks = min(32 * 1024 // math.ceil(width / _WARP), math.ceil(rows / 32))
    return 2 * blocks * width * args[0].element_size()


_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
