"""What stands in for kernels of other packages: the tensors that each function gives, keeps and needs meanwhile.

Each row names the files that say so. Attention is torch's own flash or memory-efficient kernel, which these packages'
kernels are: it keeps the same tensors, and its arithmetic is counted.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor, nn

from dryfit.gpu.presence import StandIn
from dryfit.gpu.state_spaces import conv_modules, mamba_modules, signature
from dryfit.gpu.triton_stand_in import TRITON

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WIDTH_ALIGNMENT = 8


# flash-attn: dense queries, keys and values are (rows, tokens, heads, width), those of rows without padding (tokens,
# heads, width).


def _flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Any, Any, int, int], kwargs: dict[str, Any]
) -> Any:
    """Attend.

    Args:
        lengths: Where the rows of queries and of keys begin (None: they have one length), and the longest of each.
        kwargs: Of the package's function.

    Raises:
        RuntimeError: As of the package: the type or the device is none of its kernel's.
    """
    if query.dtype not in _HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    width = query.shape[-1]
    scale = kwargs.get("softmax_scale") or width**-0.5
    given = [one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value)]
    if missing := -width % _WIDTH_ALIGNMENT:
        given = [F.pad(one, (0, missing)) for one in given]
    dropout, causal = kwargs.get("dropout_p", 0.0), kwargs.get("causal", False)
    out, sums, *_ = _aten._flash_attention_forward(*given, *lengths, dropout, causal, False, scale=scale)
    out = out[..., :width] if missing else out
    return (out, sums, None) if kwargs.get("return_attn_probs") else out


class _Unpack(torch.autograd.Function):
    """Takes queries, keys and values out of one tensor; their gradients are parts of one from their beginning."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Any:  # pyright: ignore
        """Return views."""
        ctx.shape = packed.shape
        return tuple(one.detach() for one in packed.unbind(-3))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Give the gradients' memory back, and make one gradient in their place."""
        made = gradients[0]
        for one in gradients:
            one.untyped_storage().resize_(0)
        return made.new_empty(ctx.shape)


def _unpack(packed: Tensor) -> tuple[Tensor, ...]:
    made: Any = _Unpack.apply(packed)  # pyright: ignore
    return made


def _flash_func(*args: Any, **kwargs: Any) -> Any:
    given = {**dict(zip(("q", "k", "v", "dropout_p", "softmax_scale", "causal"), args, strict=False)), **kwargs}
    q, k, v = (given.pop(name) for name in "qkv")
    return _flash(q, k, v, (None, None, q.shape[1], k.shape[1]), given)


def _flash_varlen(*args: Any, **kwargs: Any) -> Any:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = {**dict(zip((*names, "dropout_p", "softmax_scale", "causal"), args, strict=False)), **kwargs}
    q, k, v, begins_q, begins_k, most_q, most_k = (given.pop(name) for name in names)
    return _flash(q, k, v, (begins_q, begins_k, int(most_q), int(most_k)), given)


def _flash_qkv(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _flash_func(*_unpack(qkv), *args, **kwargs)


def _flash_kv(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _flash_func(q, *_unpack(kv), *args, **kwargs)


def _flash_varlen_qkv(qkv: Tensor, cu_seqlens: Any, max_seqlen: Any, *args: Any, **kwargs: Any) -> Any:
    return _flash_varlen(*_unpack(qkv), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def _flash_varlen_kv(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _flash_varlen(q, *_unpack(kv), *args, **kwargs)


def _flash_cached(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(q)


def _flash3(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **_: Any) -> Any:
    return _flash_func(q, k, v, 0.0, softmax_scale, causal)


def _flash3_varlen(*args: Any, **kwargs: Any) -> Any:
    named = dict(zip(("softmax_scale", "causal"), args[9:], strict=False))  # seqused_q and seqused_k are before them
    return _flash_varlen(*args[:7], **named, **kwargs)


def _unpad(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(taken.flatten(), as_tuple=False).flatten()
    begins = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return _rows_at(hidden_states.flatten(0, 1), indices), indices, begins, int(lengths.max().item()), used


def _rows_at(tensor: Tensor, indices: Tensor) -> Tensor:
    return tensor.index_select(0, indices)


def _pad(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


_DENSE = "q k v"
_RAGGED = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_OPTIONS_3 = (
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa"
    " deterministic sm_margin"
)


def _signed(function: Callable[..., Any], needed: str, options: str) -> Callable[..., Any]:
    """Give a function the parameters of the package's own: transformers passes those alone that it finds there."""

    def signed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signed.__signature__ = signature(needed, options)  # pyright: ignore[reportFunctionMemberAccess]
    return signed


class _Rotate(torch.autograd.Function):
    """Rotates by tables of cosines and sines, which it keeps; its backward pass rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:  # pyright: ignore
        """Rotate, in place or not."""
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        return x.view_as(x) if inplace else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Rotate the gradient."""
        return gradients[0] if ctx.inplace else torch.empty_like(gradients[0]), None, None, None


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, *_: Any, **__: Any
) -> Any:
    return _Rotate.apply(x, cos, sin, inplace)  # pyright: ignore


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    return _Rotate.apply(x, cos, sin, True)  # pyright: ignore


class _RotaryEmbedding(nn.Module):
    """The package's layer: tables of the longest sequence so far; what it is given is rotated in place."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, base, interleaved, scale_base
        powers = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / base**powers, persistent=False)
        self._seq_len_cached = 0

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if seqlen > self._seq_len_cached:
            self._seq_len_cached = seqlen
            self._cos_cached, self._sin_cached = torch.empty((2, seqlen, self.dim // 2), device=device, dtype=dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Any = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate queries and keys."""
        self._update_cos_sin_cache(max_seqlen or qkv.shape[1], qkv.device, qkv.dtype)
        turned = _rotate_in_place(qkv, self._cos_cached, self._sin_cached)
        return turned if kv is None else (turned, _rotate_in_place(kv, self._cos_cached, self._sin_cached))


class _NormWithResidual(torch.autograd.Function):
    """Adds a residual, drops and normalises in one kernel; keeps the sum, and a number or two of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, residual: Any, given: dict[str, Any]) -> Any:  # pyright: ignore
        """Return what is normalised, with the sum where that is asked for."""
        rows = x.numel() // x.shape[-1]
        wanted = residual.dtype if residual is not None else torch.float32 if given["residual_in_fp32"] else x.dtype
        drops = bool(given["dropout_p"]) or given["rowscale"] is not None
        out = torch.empty_like(x, dtype=given["out_dtype"] or x.dtype)
        makes_sum = residual is not None or wanted != x.dtype or drops
        total = x.new_empty(x.shape, dtype=wanted) if makes_sum else x.view_as(x)
        statistics = [x.new_empty((rows,), dtype=torch.float32) for _ in range(2 - bool(given["is_rms_norm"]))]
        seeds = [x.new_empty((rows,), dtype=torch.int64)] if given["dropout_p"] else []
        ctx.save_for_backward(total, weight, bias, *statistics, *seeds)
        ctx.taken = x.dtype, residual is not None, drops
        return (out, total) if given["prenorm"] else out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return gradients; those of weight and bias are summed over blocks of rows, eight a multiprocessor."""
        total, weight, bias, *_ = ctx.saved_tensors
        dtype, has_residual, drops = ctx.taken
        of_x = torch.empty_like(total, dtype=dtype)
        of_residual = (
            (of_x if dtype == total.dtype and not drops else torch.empty_like(total)) if has_residual else None
        )
        blocks = 8 * torch.cuda.get_device_properties(total.device).multi_processor_count
        parts = [
            total.new_empty((blocks, total.shape[-1]), dtype=torch.float32) for one in (weight, bias) if one is not None
        ]
        sums = [part.sum(0).to(weight.dtype) for part in parts]
        return of_x, sums[0], sums[1] if bias is not None else None, of_residual, None


_NORM = (
    *("x", "weight", "bias", "residual", "x1", "weight1", "bias1", "eps", "dropout_p", "rowscale", "prenorm"),
    *("residual_in_fp32", "zero_centered_weight", "is_rms_norm", "return_dropout_mask", "out_dtype"),
)


def _norm_with_residual(*args: Any, **kwargs: Any) -> Any:
    given = {**dict.fromkeys(_NORM), **dict(zip(_NORM, args, strict=False)), **kwargs}
    if given["x1"] is not None or given["weight1"] is not None or given["return_dropout_mask"]:
        raise NotImplementedError("the stand-in for flash-attn's norm has no second input and gives no mask")
    taken = [given.pop(name) for name in ("x", "weight", "bias", "residual")]
    return _NormWithResidual.apply(*taken, given)  # pyright: ignore


def _rms_norm_with_residual(*args: Any, **kwargs: Any) -> Any:
    return _norm_with_residual(*args, **{**kwargs, "is_rms_norm": True})


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and a number a row; its gradient takes the logits' place where that is asked for."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, in_place: bool) -> Any:  # pyright: ignore
        """Return the loss and the z-loss of each row."""
        losses, sums, z_losses = (logits.new_empty((len(logits),), dtype=torch.float32) for _ in range(3))
        ctx.save_for_backward(logits, sums, labels)
        ctx.in_place = in_place
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the gradient of the logits."""
        logits, _, _ = ctx.saved_tensors
        return logits if ctx.in_place else torch.empty_like(logits), None, None


def _cross_entropy(logits: Tensor, labels: Tensor, *_: Any, inplace_backward: bool = False, **__: Any) -> Any:
    return _CrossEntropy.apply(logits, labels, inplace_backward)  # pyright: ignore


class _CrossEntropyLoss(nn.Module):
    """The package's loss."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", *_: Any, inplace_backward: bool = False, **__: Any
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.inplace_backward = ignore_index, reduction, inplace_backward

    def forward(self, input: Tensor, target: Tensor, **_: Any) -> Any:
        """Return the loss."""
        losses, _ = _cross_entropy(input, target, inplace_backward=self.inplace_backward)
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses


def _inner(name: str) -> Callable[..., Any]:
    """Return a private function of the package: there to be imported."""

    def called(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} of flash-attn has no stand-in")

    return called


def _flash_modules() -> Mapping[str, Mapping[str, Any]]:
    functions = {
        "flash_attn_func": _signed(_flash_func, _DENSE, _OPTIONS),
        "flash_attn_varlen_func": _signed(_flash_varlen, _RAGGED, f"{_OPTIONS} block_table"),
        "flash_attn_qkvpacked_func": _flash_qkv,
        "flash_attn_kvpacked_func": _flash_kv,
        "flash_attn_varlen_qkvpacked_func": _flash_varlen_qkv,
        "flash_attn_varlen_kvpacked_func": _flash_varlen_kv,
        "flash_attn_with_kvcache": _flash_cached,
    }
    inner = [f"flash_attn_{kind}{way}" for kind in ("", "varlen_") for way in ("forward", "backward")]
    rotary = {
        "apply_rotary_emb": _rotate,
        "apply_rotary_emb_func": _rotate,
        "apply_rotary_emb_qkv_": _rotate_in_place,
        "apply_rotary_emb_kv_": _rotate_in_place,
        "RotaryEmbedding": _RotaryEmbedding,
    }
    return {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": functions | {f"_{name}": _inner(name) for name in inner},
        "flash_attn.bert_padding": {"unpad_input": _unpad, "pad_input": _pad, "index_first_axis": _rows_at},
        "flash_attn.modules": {},
        "flash_attn.modules.mha": functions,
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": rotary,
        "flash_attn.losses": {},
        "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": _CrossEntropyLoss},
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": _cross_entropy},
        "flash_attn.ops.triton.layer_norm": {
            "layer_norm_fn": _norm_with_residual,
            "rms_norm_fn": _rms_norm_with_residual,
        },
    }


def _flash3_modules() -> Mapping[str, Mapping[str, Any]]:
    functions = {
        "flash_attn_func": _signed(_flash3, _DENSE, _OPTIONS_3),
        "flash_attn_varlen_func": _signed(_flash3_varlen, _RAGGED, f"seqused_q seqused_k {_OPTIONS_3}"),
    }
    return {"flash_attn_interface": {**functions, "flash_attn_with_kvcache": _flash_cached}}


# xformers: (rows, tokens, heads, width); its flash kernel where that takes the call, else torch's choice.


class _LowerTriangular:
    """A causal mask."""


class _Blocks:
    """Rows side by side, of which each sees itself."""

    causal = False

    def __init__(self, queries: Sequence[int], keys: Sequence[int], batches: Sequence[int] | None = None) -> None:
        self.queries, self.keys = list(queries), list(keys)
        self.batches = [1] * len(self.queries) if batches is None else list(batches)

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **_: Any) -> "_Blocks":
        """Return the mask of rows of these lengths."""
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["_Blocks", Tensor]:
        """Return the mask of the rows of tensors (batch, tokens, ...), and the tensors side by side."""
        mask = cls.from_seqlens([one.shape[1] for one in tensors for _ in range(len(one))])
        mask.batches = [len(one) for one in tensors]
        return mask, _side_by_side(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple["_Blocks", Tensor, Tensor, Tensor | None]:
        """Return the mask of the rows of queries and keys, and each of the three side by side."""
        queries, keys = ([one.shape[1] for one in some for _ in range(len(one))] for some in (tensors_q, tensors_k))
        mask = cls(queries, keys, [len(one) for one in tensors_q])
        values = None if tensors_v is None else _side_by_side(tensors_v)
        return mask, _side_by_side(tensors_q), _side_by_side(tensors_k), values

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return tensors (batch, tokens, ...) of what lies side by side."""
        return self._split(tensor, self.queries)

    split_queries = split

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """Return tensors of keys or values that lie side by side."""
        return self._split(tensor, self.keys)

    def _split(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        rows = iter(lengths)
        sizes = [sum(islice(rows, batch)) for batch in self.batches]
        parts = zip(tensor.split(sizes, dim=1), self.batches, strict=True)
        return [part.reshape(batch, -1, *tensor.shape[2:]) for part, batch in parts]

    def make_causal(self) -> "_CausalBlocks":
        """Return the same rows, of which each token sees those before it."""
        return _CausalBlocks(self.queries, self.keys, self.batches)

    make_causal_from_bottomright = make_causal

    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Return where rows begin on the device, and the longest."""
        begins = [torch.tensor([0, *one], device="cuda").cumsum(0).to(torch.int32) for one in (self.queries, self.keys)]
        return begins[0], begins[1], max(self.queries), max(self.keys)


class _CausalBlocks(_Blocks):
    causal = True


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.reshape(1, -1, *one.shape[2:]) for one in tensors], dim=1)


def _memory_efficient(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    named = {**dict(zip(("attn_bias", "p", "scale"), args, strict=False)), **kwargs}
    attn_bias, p, scale = named.get("attn_bias"), named.get("p", 0.0), named.get("scale")
    options: dict[str, Any] = {"dropout_p": p, "softmax_scale": scale}
    is_flash = query.dtype in _HALF and torch.cuda.get_device_capability(query.device) >= (8, 0)
    if isinstance(attn_bias, _Blocks):
        if not is_flash:
            begins_and_most, kind = attn_bias.lengths(), int(attn_bias.causal)
            given = (query, key, value, None, *begins_and_most, p, kind, query.requires_grad)
            return torch.ops.aten._efficient_attention_forward(*given, scale=scale)[0]
        q, k, v = (one.flatten(0, 1) for one in (query, key, value))
        return _flash(q, k, v, attn_bias.lengths(), {**options, "causal": attn_bias.causal})[None]
    is_causal = isinstance(attn_bias, _LowerTriangular) or attn_bias is _LowerTriangular
    if query.dim() == 4 and is_flash and (is_causal or attn_bias is None):
        return _flash_func(query, key, value, causal=is_causal, **options)
    given = [one.transpose(1, 2) if one.dim() == 4 else one.unsqueeze(1) for one in (query, key, value)]
    mask: Any = None if is_causal else attn_bias
    out = F.scaled_dot_product_attention(*given, attn_mask=mask, dropout_p=p, is_causal=is_causal, scale=scale)
    return out.transpose(1, 2) if query.dim() == 4 else out.squeeze(1)


def _xformers_modules() -> Mapping[str, Mapping[str, Any]]:
    masks = {f"LowerTriangular{way}Mask": _LowerTriangular for way in ("", "FromBottomRight")}
    blocks: dict[str, Any] = {f"BlockDiagonalCausal{way}Mask": _CausalBlocks for way in ("", "FromBottomRight")}
    blocks["BlockDiagonalMask"] = _Blocks
    attention = {"memory_efficient_attention": _memory_efficient}
    return {
        "xformers": {},
        "xformers.ops": {**attention, **masks},
        "xformers.ops.fmha": {**attention, **masks, **blocks},
        "xformers.ops.fmha.attn_bias": {**masks, **blocks},
    }


# Norms: torch's own keep the same: inputs, and mean and deviation of each row in fp32.


def _norm(kind: type[nn.Module], place: str | None = None) -> type[nn.Module]:
    class Norm(kind):
        """A fused norm."""

        def __init__(
            self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **others: Any
        ) -> None:
            where = {"device": others.get("device", place), "dtype": others.get("dtype")}
            super().__init__(normalized_shape, eps, elementwise_affine, **where)

    return Norm


def _apex_modules() -> Mapping[str, Mapping[str, Any]]:
    layer, root = _norm(nn.LayerNorm), _norm(nn.RMSNorm)
    norms = {f"{mixed}FusedLayerNorm": layer for mixed in ("", "Mixed")}
    norms |= {f"{mixed}FusedRMSNorm": root for mixed in ("", "Mixed")}
    return {"apex": {}, "apex.normalization": norms, "apex.normalization.fused_layer_norm": norms}


def _engine_modules() -> Mapping[str, Mapping[str, Any]]:
    norms = {"LayerNorm": _norm(nn.LayerNorm, "cuda"), "RMSNorm": _norm(nn.RMSNorm, "cuda")}
    return {"transformer_engine": {}, "transformer_engine.pytorch": norms}


STAND_INS: Final[Mapping[str, StandIn]] = {
    "triton": TRITON,
    "flash_attn": StandIn(
        "2.8.3",
        "flash_attn_interface.py (0053002), csrc/flash_attn/flash_api.cpp (00979f5), layers/rotary.py (09d422b), "
        "ops/triton/cross_entropy.py (058ad35) and ops/triton/layer_norm.py",
        _flash_modules,
        "flash-attn",
    ),
    "flash_attn_interface": StandIn(
        "3.0.0", "hopper/flash_attn_interface.py (01afd16), scratch as of flash-attn 2", _flash3_modules, "flash-attn-3"
    ),
    "xformers": StandIn("0.0.35", "ops/fmha/__init__.py and flash.py, 0.0.35", _xformers_modules, "xformers"),
    "causal_conv1d": StandIn(
        "1.6.1",
        "causal_conv1d_interface.py and cpp_functions.py (0d2252d)",
        conv_modules,
        "causal-conv1d",
    ),
    "mamba_ssm": StandIn(
        "2.3.2",
        "selective_scan_interface.py, ops/triton/ssd_*.py and layernorm_gated.py (e9594ce), "
        "csrc/selective_scan/selective_scan.cpp (23f42a1)",
        mamba_modules,
        "mamba-ssm",
        is_timed=False,
    ),
    "apex": StandIn("0.1", "apex/normalization/fused_layer_norm.py (014f30f)", _apex_modules, "apex"),
    "transformer_engine": StandIn(
        "2.8.0", "transformer_engine/pytorch/module/rmsnorm.py (0288e53)", _engine_modules, "transformer-engine"
    ),
}
"""Packages that are never made up without being asked for: :mod:`dryfit.gpu.presence` says when they are there."""


def provided(name: str) -> str:
    """Return what the stand-in for a package has of a module that lacks a name, or its modules; empty: no stand-in."""
    package = name.partition(".")[0]
    module = sys.modules.get(name) or sys.modules.get(package)
    row = STAND_INS.get(package)
    if module is None or row is None or getattr(module, "__file__", None) is not None:
        return ""
    modules = row.modules()
    return ", ".join(sorted(modules.get(name, modules)))
