"""What CUDA kernels choose and allocate besides outputs: attention, workspaces, quantised layers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from dryfit.gpu import recurrent
from dryfit.gpu.constants import Processors
from dryfit.gpu.private_apis.torch_operators import ARGUMENTS
from dryfit.gpu.private_apis.torch_recording import scoped_library
from dryfit.settings.older_python import StrEnum

# Choose the kernel of ``scaled_dot_product_attention`` as torch does on a CUDA device.
#
# Without a device torch's own choice falls to plain matrix products, which hold the whole score matrix. The rules are
# those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and the operators around each kernel those of
# ``aten/src/ATen/native/transformers/attention.cpp``, torch 2.11 to 2.14.
#
# Queries, keys and values are (rows, heads, tokens, width of a head).


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


def kernel_choices(capability: tuple[int, int]) -> dict[str, Callable[..., bool]]:
    """Return what answers for a device in the place of functions of ``torch.backends.cuda``, by their names.

    Attention of jagged nested tensors asks them.
    """

    def answer(takes: Callable[[AttentionCall], bool]) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            asked = (params.query, params.key, params.value, params.attn_mask, params.dropout, params.enable_gqa)
            return takes(_call_of(*asked))

        return can_use

    return {
        "can_use_cudnn_attention": answer(lambda call: _cudnn_takes(call, _CUDNN_MOST_WIDTHS.get(capability, 0))),
        "can_use_flash_attention": answer(lambda call: _flash_takes(call, capability)),
        "can_use_efficient_attention": answer(lambda call: _efficient_takes(call, capability)),
    }


def _call_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_grouped: bool,
) -> AttentionCall:
    return AttentionCall(
        dtype=query.dtype,
        width=query.shape[-1],
        value_width=value.shape[-1],
        has_mask=mask is not None,
        dropout=dropout,
        trains=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)),
        same_heads=not is_grouped or query.shape[-3] == key.shape[-3],
    )


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
    _step_in_place()
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
        call = _call_of(query, key, value, attn_mask, dropout_p, enable_gqa)
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
        for name in OF_ONE_KERNEL:
            library.impl(name, _not_called, "CUDA", allow_override=True)
        yield attention


# torch composes these of other operators for a device without a kernel of their own (``CompositeImplicitAutograd`` in
# native_functions.yaml), so a CPU build does on fake CUDA tensors: it keeps and makes tensors that a device does not
# have. That there is a kernel is enough: fakes answer before it. To be removed when CPU builds have such kernels.
OF_ONE_KERNEL: Final = ("silu_backward", "mish_backward", *({"_fused_rms_norm"} & ARGUMENTS.keys()))
"""Operators of one kernel on CUDA: RMSNorm's since torch 2.9 (``layer_norm_kernel.cu``)."""


def _not_called(*_: object) -> torch.Tensor:
    raise AssertionError("a kernel of CUDA was called on a fake tensor")


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


# Scratch memory of CUDA kernels, which no operator's output shows.
#
# Formulas follow the kernels' sources in ``aten/src/ATen/native``; each names its file. They hold for dense,
# contiguous inputs. Kernels free it before their operator returns. cuDNN's source is closed: its attention, and most
# of its convolutions but for a weight's gradient, are as measured on an H200 (docs/measurements/gpu-
# histories-h200.jsonl); there the sums of a bias' gradient and of an embedding with many rows were as these formulas
# say.


_FP32_BYTES = 4
_INT64_BYTES = 8
_FLASH_ROWS = 128
_FLASH_WIDTH = 32
_EFFICIENT_ROWS = 64
_WARP = 32
_SORTED_ABOVE = 3072
_ROWS_OF_PART = 10

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


def adds_bias(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a product with a bias goes to cuBLASLt (``cuda/Blas.cpp``, ``addmm_out_cuda_impl``)."""
    return func is _aten.addmm.default and args[0].dim() == 1


def scratch_blocks(func: Any, args: tuple[Any, ...], out: Any, processors: Processors | None = None) -> tuple[int, ...]:
    """Return the bytes of each scratch block that an operator's CUDA kernel holds at once; none where none are known.

    Args:
        func: The operator's overload.
        args: Its arguments.
        out: Its result.
        processors: Of the device; None leaves out what grows by steps with the rows of a batch, from which nothing can
            be interpolated: parts of sums.
    """
    if processors is not None and func in _REDUCTIONS:
        taken: int | tuple[int, ...] = _reduction(args[0], out, processors)
    elif processors is not None and func is _aten.embedding_dense_backward.default:
        taken = _embedding_backward(args)
    else:
        taken = _FORMULAS[func](args, out) if func in _FORMULAS else 0
    return tuple(filter(None, taken if isinstance(taken, tuple) else (taken,)))


def _reduction(input_: torch.Tensor, out: torch.Tensor, processors: Processors) -> int:
    # cuda/Reduce.cuh, setReduceConfig and ReduceConfig.global_memory_size, for accumulation in fp32: where few outputs
    # are summed from many inputs, several blocks sum parts of one output, and leave these in global memory.
    outputs = out.numel()
    kept = _kept_strides(input_, out)
    if kept is None or not outputs or outputs == input_.numel():
        return 0
    inputs = input_.numel() // outputs
    (fastest_kept, kept_size), fastest_reduced = kept
    if fastest_reduced < fastest_kept:
        return 0  # a block holds one output: its parts are some numbers
    vector = 4 if fastest_kept == 1 else 1
    while kept_size % vector:
        vector //= 2
    most_threads = _REDUCE_THREADS // vector
    width = min(_power_of_two(outputs // vector, most_threads), _WARP)
    height = min(_power_of_two(inputs, most_threads), most_threads // width)
    width = min(_power_of_two(outputs // vector, most_threads), most_threads // height)
    each = math.ceil(inputs / height)
    if inputs < 16 * height or each < _MOST_VALUES:
        return 0
    grid = math.ceil(outputs // vector / width)
    target = processors.count * (processors.threads // (width * height))
    if grid > target:
        return 0
    parts = max(min(math.ceil(target / grid), math.ceil(each / 16)), math.ceil(each / _MOST_VALUES))
    return _FP32_BYTES * outputs * parts * width * vector if parts > 1 else 0


def _kept_strides(input_: torch.Tensor, out: torch.Tensor) -> tuple[tuple[int, int], int] | None:
    """Return the smallest stride of the dimensions that stay, with its size, and that of those that are summed."""
    sizes: Sequence[int] = out.shape
    if input_.dim() != out.dim():  # without ``keepdim``: leading dimensions are summed, or it is not known which
        if input_.shape[input_.dim() - out.dim() :] != out.shape:
            return None
        sizes = (*[1] * (input_.dim() - out.dim()), *out.shape)
    dims = [(input_.stride(at), input_.shape[at], sizes[at] == 1) for at in range(input_.dim()) if input_.shape[at] > 1]
    kept = [(stride, size) for stride, size, is_summed in dims if not is_summed]
    summed = [stride for stride, _, is_summed in dims if is_summed]
    return (min(kept), min(summed)) if kept and summed else None


def _power_of_two(number: int, most: int) -> int:
    """Return the largest power of two that is no larger than a number, at most ``most``."""
    return most if number >= most else 1 << max(0, number.bit_length() - 1)


def _flash_backward(args: tuple[Any, ...], _out: Any) -> int:
    # flash_attn/flash_api.cpp, mha_bwd: softmax_d (B, H, rounded L) and, as the key's length is split over blocks,
    # dq_accum (B, H, rounded L, rounded D) in fp32. Deterministic mode takes more.
    query, key = args[1], args[2]
    rows, heads, length, width = query.shape
    rounded_length = math.ceil(length / _FLASH_ROWS) * _FLASH_ROWS
    keys = rows * key.shape[2] if key.shape[1] != heads else 0
    return _flash_scratch(rows * rounded_length, keys, heads, width, query.element_size())


def _flash_scratch(tokens: int, keys: int, heads: int, width: int, element_bytes: int) -> int:
    # With fewer heads of keys also their gradients, and those of values, for each head of the query.
    rounded_width = math.ceil(width / _FLASH_WIDTH) * _FLASH_WIDTH
    return heads * (tokens * (rounded_width + 1) * _FP32_BYTES + 2 * keys * width * element_bytes)


def _packed_flash_backward(args: tuple[Any, ...], _out: Any) -> int:
    # The same, for (rows, tokens, heads, width), and for (tokens, heads, width) of rows without padding: mha_varlen_bwd
    # has a block more for each row.
    query, key, begins = args[1], args[2], args[6]
    heads, width = query.shape[-2:]
    if query.dim() == 4:
        tokens = query.shape[0] * math.ceil(query.shape[1] / _FLASH_ROWS) * _FLASH_ROWS
    else:
        tokens = query.shape[0] + _FLASH_ROWS * (begins.numel() - 1)
    keys = math.prod(key.shape[:-2]) if key.shape[-2] != heads else 0
    return _flash_scratch(tokens, keys, heads, width, query.element_size())


def _cudnn_backward(args: tuple[Any, ...], _out: Any) -> int:
    # As measured: the gradient of the query and a number for each of its rows in fp32; with fewer heads of keys,
    # gradients of keys and values for each head of the query.
    query, key = args[1], args[2]
    rows, heads, length, width = query.shape
    shared = 2 * rows * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return rows * heads * length * (width + 1) * _FP32_BYTES + shared


def _efficient_backward(args: tuple[Any, ...], _out: Any) -> int:
    # transformers/cuda/attention_backward.cu, _efficient_attention_backward, and kernel_backward.h: delta (B, H, L) in
    # fp32; in fp32 what is staged of dq for each block of 64 rows, in columns of 64 or 128; and the accumulators of dq,
    # dk and dv in fp32 where the outputs are in half precision and a block cannot hold them (heads wider than 128).
    query, key = args[1], args[2]
    rows, heads, length, width = query.shape
    delta = rows * heads * length * _FP32_BYTES
    if query.dtype is torch.float32:
        columns = 64 if width <= 64 else 128
        staged = math.ceil(width / columns) * (_EFFICIENT_ROWS * columns * _FP32_BYTES + 16)
        return delta + rows * heads * math.ceil(length / _EFFICIENT_ROWS) * staged
    if width <= 128:
        return delta
    return delta + rows * heads * width * (length + 2 * key.shape[2]) * _FP32_BYTES


def _sorted_indices(args: tuple[Any, ...], _out: Any) -> int:
    # cuda/Embedding.cu, embedding_dense_backward_cuda: above 3072 indices, these and their positions are sorted, in two
    # copies each, with as much for the sort itself.
    count = args[1].numel()
    return 0 if count <= _SORTED_ABOVE else 5 * count * _INT64_BYTES


def _embedding_backward(args: tuple[Any, ...]) -> int:
    # cuda/Embedding.cu, embedding_dense_backward_cuda, and cuda/EmbeddingBackwardKernel.cu: above 3072 indices, these
    # are sorted (copies of indices and positions remain), and the rows of a segment of equal indices are summed by
    # tens, in fp32. How many segments there are is not asked: there is room for as many as indices or rows.
    gradient, indices, rows = args[:3]
    count = indices.numel()
    if count <= _SORTED_ABOVE:
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
    if rows <= 64 * 1024 or width // _WARP >= 54:
        return 0
    blocks = min(32 * 1024 // math.ceil(width / _WARP), math.ceil(rows / 32))
    return 2 * blocks * width * args[0].element_size()


def _convolution(args: tuple[Any, ...], out: Any) -> int:
    input_, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    return _convolved(input_, weight, out, stride, groups, transposed=transposed)


def _convolution_backward(args: tuple[Any, ...], _out: Any) -> int:
    gradient, input_, weight, stride, transposed, groups = *args[:3], args[4], args[7], args[9]
    return _convolved(input_, weight, gradient, stride, groups, transposed=transposed)


def _convolved(
    input_: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    stride: Sequence[int],
    groups: int,
    *,
    transposed: bool,
) -> int:
    # cuDNN, whose source is closed, as measured in 16 bits and TF32: kernels for tensor cores work on channels last;
    # others are copied, input, output and weights, in 16 bits with channels filled up to a multiple of eight. A
    # weight's gradient takes a little more. torch's own kernels for one channel a group (cuda/DepthwiseConv2d.cu), and
    # products in the place of 1x1 convolutions, take none.
    channels = input_.shape[1]
    if groups == channels or input_.dtype is torch.float64:
        return 0
    if weight[0, 0].numel() == 1 and all(one == 1 for one in stride) and not transposed:
        return 0
    filled = math.ceil(channels / 8) * 8 if input_.dtype is not torch.float32 else channels
    copies = (input_.nbytes + weight.nbytes) * filled // channels
    if _has_channels_last(input_) or _has_channels_last(weight):
        return copies if filled != channels else 0
    return copies + out.nbytes


def _has_channels_last(tensor: torch.Tensor) -> bool:
    form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d if tensor.dim() == 5 else None
    return form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()


def _softmax_backward(args: tuple[Any, ...], _out: Any) -> int:
    # cuda/SoftMax.cu, softmax_backward_cuda_out: the product of gradient and output.
    return args[0].nbytes


# cuda/SpectralOps.cpp, for cuFFT, whose documentation says that a plan works in at least as many complex numbers as it
# transforms; a real signal's transform has the half of them that is not mirrored.


def _fft_of_complex(args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, ...]:
    # Of more than three dimensions, in several transforms, which have two outputs by turns.
    return (out.nbytes, *[out.nbytes] * (len(args[1]) > _FFT_MOST_DIMS))


def _fft_of_real(args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, ...]:
    # _fft_r2c_cufft: from the first two dimensions on, the last one alone and then the others, into a second output.
    signal, dims = args[0], args[1]
    last = signal.shape[dims[-1]]
    workspace = signal.numel() // max(1, last) * (last // 2 + 1) * out.element_size()
    in_turns = len(dims) > _FFT_MOST_DIMS or (len(dims) > 1 and tuple(dims[:2]) == (0, 1))
    return (workspace, *[out.nbytes] * in_turns)


def _fft_to_real(args: tuple[Any, ...], _out: torch.Tensor) -> tuple[int, ...]:
    # _fft_c2r_cufft: such a transform may overwrite its input, which is copied.
    return (args[0].nbytes, args[0].nbytes)


_FFT_MOST_DIMS = 3
_REDUCE_THREADS = 512
_MOST_VALUES = 256
_REDUCTIONS = frozenset({_aten.sum.dim_IntList, _aten.mean.dim})
_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int | tuple[int, ...]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._flash_attention_backward.default: _packed_flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.embedding_dense_backward.default: _sorted_indices,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._fft_c2c.default: _fft_of_complex,
    _aten._fft_r2c.default: _fft_of_real,
    _aten._fft_c2r.default: _fft_to_real,
    _aten._cudnn_rnn.default: recurrent.scratch_blocks,
    _aten._cudnn_rnn_backward.default: recurrent.scratch_blocks,
}
TAKE_SCRATCH = _REDUCTIONS | _FORMULAS.keys()
"""Operators of which :func:`scratch_blocks` knows scratch memory."""


# What bitsandbytes' CUDA kernels allocate, on fakes.
#
# The library's own fakes show outputs alone. Here a product with 4-bit weights is the three operators that its kernel
# consists of (``backends/cuda/ops.py``, ``_dequant_linear_fallback``): scales, matrix, product. For few tokens (up to
# 4 always, up to 1 536 by size and device) the library has a kernel that needs no matrix: above 4 this is an upper
# bound.
#
# LLM.int8() multiplies in 16 bits the few columns of an input in which a value reaches 6.0 (of the models that its
# paper measures, at most seven of thousands: https://arxiv.org/abs/2208.07339, section 3.3). Here there are none, and
# the product is the two operators of the library's kernel.


_FEW_TOKENS = 4


@cache
def install() -> None:
    """Let bitsandbytes' operators allocate on fakes what they do on a CUDA device; it must be imported.

    Before 0.46 it has functions that call its native library in their place, which allocate what they return.
    """
    if not hasattr(torch.ops.bitsandbytes, "int8_vectorwise_quant"):
        return
    # The library's own ask for a number of columns that values decide.
    torch.library.register_fake("bitsandbytes::int8_vectorwise_quant", _by_row, allow_override=True)
    torch.library.register_fake("bitsandbytes::int8_double_quant", _by_row_and_column, allow_override=True)
    # At autograd's place in the dispatcher, which comes before the modes that record: they see the parts.
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("gemm_4bit", _four_bit, "AutogradCUDA")
    library.impl("int8_mixed_scaled_mm", _eight_bit, "AutogradCUDA")
    library.impl("int8_vectorwise_quant", _by_row, "AutogradCUDA")
    _KEPT.append(library)


@cache
def _step_in_place() -> None:
    """Give the one fused optimizer that has no kernel for tensors without data (torch 2.13) one that does nothing."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_sgd_", lambda *_, **__: None, "Meta")
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
