"""Choose the kernel of ``scaled_dot_product_attention`` as torch does on a CUDA device.

Without a device torch's own choice falls to plain matrix products, which hold the whole score matrix. The rules are
those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and the operators around each kernel those of
``aten/src/ATen/native/transformers/attention.cpp``, torch 2.11 to 2.14.

Queries, keys and values are (rows, heads, tokens, width of a head).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.meta.private_apis.torch_recording import scoped_library

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_MOST_WIDTH = 256
_CUDNN_MOST_WIDTHS = {(9, 0): 256, (10, 0): 128}
_ROUNDS_DROPOUT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether torch asks for another kernel where cuDNN would round the dropout: 2.11.0 does not, as an H200 showed."""
_MASK_ALIGNMENT = 8
_WIDTH_ALIGNMENT = 8


class Backend(StrEnum):
    """A kernel behind ``scaled_dot_product_attention``."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The facts about a call that decide its kernel.

    Attributes:
        width: Width of a head of the query; ``value_width`` of the value.
        trains: Whether a gradient will be asked for.
        same_heads: Whether keys have as many heads as queries; fewer are shared by groups of them.
    """

    dtype: torch.dtype
    width: int
    value_width: int
    has_mask: bool
    dropout: float
    trains: bool
    same_heads: bool = True


def choose_backend(call: AttentionCall, capability: tuple[int, int]) -> Backend:
    """Return the kernel that a device of this compute capability takes, in torch's order of preference."""
    if _cudnn_takes(call, _CUDNN_MOST_WIDTHS.get(capability, 0)):
        return Backend.CUDNN
    if _flash_takes(call, capability):
        return Backend.FLASH
    if _efficient_takes(call, capability):
        return Backend.EFFICIENT
    return Backend.MATH


def _cudnn_takes(call: AttentionCall, most_width: int) -> bool:
    # cuDNN rounds the dropout probability to sixteenths.
    exact_dropout = not _ROUNDS_DROPOUT or (call.dropout * 16) % 1 == 0
    aligned = call.width % _WIDTH_ALIGNMENT == 0 and call.value_width % _WIDTH_ALIGNMENT == 0
    small = max(call.width, call.value_width) <= most_width
    return call.dtype in _HALF and aligned and small and exact_dropout


def _flash_takes(call: AttentionCall, capability: tuple[int, int]) -> bool:
    if call.has_mask or call.dtype not in _HALF or capability < (8, 0):
        return False
    if call.width != call.value_width or call.width > _FLASH_MOST_WIDTH:
        return False
    small_memory = capability in ((8, 6), (8, 9), (12, 0), (12, 1))  # less shared memory a block than (8, 0)
    wide = 192 < call.width <= 224 or (call.width > 224 and call.dropout > 0)
    return not (small_memory and call.trains and wide)


def _efficient_takes(call: AttentionCall, capability: tuple[int, int]) -> bool:
    if call.dtype not in (*_HALF, torch.float32) or capability < (5, 0) or not call.same_heads:
        return False
    if call.dtype is torch.bfloat16 and capability < (8, 0):
        return False
    alignment = 8 if call.dtype in _HALF else 4
    return call.width % alignment == 0 and call.value_width % alignment == 0


@contextmanager
def route_attention(device: str, capability: tuple[int, int]) -> Iterator[Callable[..., torch.Tensor] | None]:
    """Send attention on fake CUDA tensors to the kernel a real device would take, inside the block.

    Registered as a kernel for the dispatch keys of CUDA and not as a mode: modes are popped inside ``backward()``,
    where a recomputed forward pass would then take another kernel. Yields what takes the place of
    ``scaled_dot_product_attention``, or None where the device is another one.
    """
    if device != "cuda":
        yield None
        return

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = AttentionCall(
            dtype=query.dtype,
            width=query.shape[-1],
            value_width=value.shape[-1],
            has_mask=attn_mask is not None,
            dropout=dropout_p,
            trains=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)),
            same_heads=not enable_gqa or query.shape[-3] == key.shape[-3],
        )
        backend = choose_backend(call, capability)
        if backend is Backend.EFFICIENT and enable_gqa and query.shape[1] != key.shape[1]:
            backend = Backend.MATH  # sdp_utils.cpp, use_mem_efficient_attention: it takes as many heads of keys
        if backend is Backend.MATH or query.ndim != 4:
            return _aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if backend is Backend.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        mask = _added_mask(attn_mask, query, key)
        if backend is Backend.CUDNN:
            out = _aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, call.trains, dropout_p, is_causal, False, scale=scale
            )
        else:
            out = _aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, call.trains, dropout_p, is_causal, scale=scale
            )
        return out[0]

    with scoped_library("aten", "IMPL") as library:
        for dispatch_key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, dispatch_key, allow_override=True)
        yield attention


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Call the flash kernel; it takes widths that are multiples of eight, so others are padded and the output cut."""
    width = query.shape[-1]
    scale = scale if scale is not None else width**-0.5
    missing = -width % _WIDTH_ALIGNMENT
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :width] if missing else out


def _added_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as the memory-efficient kernel takes it: added to the scores, rows aligned, expanded."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        lowest = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, 0.0, lowest)
    aligned = mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1])
    if not aligned:
        width = mask.shape[-1]
        mask = F.pad(mask, (0, _MASK_ALIGNMENT - width % _MASK_ALIGNMENT))[..., :width]
    rows, heads, length, _ = query.shape
    return mask.expand(rows, heads, length, key.shape[-2])
