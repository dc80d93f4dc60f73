"""What stands in for causal-conv1d and mamba-ssm: the tensors that each function gives, keeps and needs meanwhile.

Each function allocates in the order of the package's own, and drops what that drops. Triton's autotuner tries kernels
in the first call with given sizes: the buffer that its benchmark writes to is counted where most else is held.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor, nn

from dryfit.gpu.triton_kernels import benchmark

_SCAN_CHUNK: Final = 2048
_ROWS_OF_BLOCK: Final = 32
"""Of the smallest block of Mamba-2's backward kernels, each of which writes sums of its own."""
_STATES_OF_BLOCK: Final = 64
_COLUMNS_OF_WARP: Final = 256
_MOST_WARPS: Final = 8


def signature(needed: str, options: str) -> Signature:
    """Return the parameters of a package's function: transformers passes those alone that it finds there."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    made = [Parameter(name, kind) for name in needed.split()]
    return Signature([*made, *(Parameter(name, kind, default=None) for name in options.split())])


def _named(needed: str, options: str = "") -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Let a function have a package's parameters and receive them by name; options that are not given are None."""

    def decorate(function: Callable[[Any], Any]) -> Callable[..., Any]:
        own = signature(needed, options)

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = own.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(SimpleNamespace(**bound.arguments))

        called.__signature__ = own  # pyright: ignore[reportFunctionMemberAccess]
        return called

    return decorate


def _options(given: Any) -> Any:
    """Return what a function was given without its tensors, which autograd saves: True in their places."""
    return SimpleNamespace(**{name: isinstance(one, Tensor) or one for name, one in vars(given).items()})


# causal-conv1d: (rows, channels, tokens).


def _conv_forward(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@_named("x weight bias dout seq_idx initial_states dfinal_states dx return_dinitial_states silu_activation")
def _conv_backward(given: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients; those of weights are summed in fp32."""
    made = torch.empty_like(given.x) if given.dx is None else given.dx
    parts = (given.weight, given.bias)
    sums = [None if one is None else torch.zeros_like(one, dtype=torch.float32) for one in parts]
    starts = torch.empty_like(given.initial_states) if given.return_dinitial_states else None
    return made, *(None if one is None else one.to(given.weight.dtype) for one in sums), starts


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:  # pyright: ignore
        """Allocate the output."""
        ctx.save_for_backward(x, weight, bias, starts)
        return _conv_forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate the gradients."""
        x, weight, bias, starts = ctx.saved_tensors
        return _conv_backward(x, weight, bias, gradients[0], None, starts, None, None, ctx.needs_input_grad[3], True)


@_named("x weight", "bias seq_idx initial_states return_final_states final_states_out activation")
def _causal_conv1d(given: Any) -> Any:
    x, weight, last = given.x, given.weight, given.final_states_out
    x = x if 1 in (x.stride(2), x.stride(1)) else x.contiguous()
    out = _CausalConv.apply(x, weight, given.bias, given.initial_states)
    if not given.return_final_states:
        return out
    return out, x.new_empty((x.shape[0], weight.shape[1] - 1, x.shape[1])).transpose(1, 2) if last is None else last


def _first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return what a function that updates a cache in place gives: as much as its first input, or its second."""
    return torch.empty_like(x)


def _state_update(_state: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def conv_modules() -> Mapping[str, Mapping[str, Any]]:
    """Return the modules of causal-conv1d."""
    functions = {"causal_conv1d_fn": _causal_conv1d, "causal_conv1d_update": _first}
    inner = {
        "causal_conv1d_fwd_function": _conv_forward,
        "causal_conv1d_bwd_function": _conv_backward,
        "causal_conv1d_update_function": _first,
    }
    return {
        "causal_conv1d": functions,
        "causal_conv1d.causal_conv1d_interface": functions,
        "causal_conv1d.cpp_functions": inner,
    }


# Mamba: (rows, channels, tokens).


def _scan_forward(u: Tensor, delta: Tensor, a: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the states after each part of the tokens, and the gated output."""
    out = torch.empty_like(delta)
    states = u.new_empty((*u.shape[:2], -(-u.shape[2] // _SCAN_CHUNK), a.shape[1] * 2), dtype=a.dtype)
    return out, states, out if z is None else torch.empty_like(z)


def _scan_backward(given: Any, dz: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what a scan is given; those of B and C are summed in fp32."""
    u, delta, a, b, c, d, z, bias = given
    gate = torch.empty_like(z) if dz is None and z is not None else dz
    made = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)]
    sums = [torch.zeros_like(one, dtype=torch.float32 if one.dim() > 2 else one.dtype) for one in (b, c)]
    rest = [None if one is None else torch.zeros_like(one) for one in (d, bias)]
    return *made, *(one.to(like.dtype) for one, like in zip(sums, (b, c), strict=True)), rest[0], gate, rest[1]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # pyright: ignore
        """Allocate the outputs."""
        u, delta, a, _, _, _, z, _ = given
        out, states, gated = _scan_forward(u, delta, a, z)
        ctx.save_for_backward(*given, states, *(() if z is None else (out,)))
        last = states[:, :, -1, 1::2]
        ctx.mark_non_differentiable(last)
        ctx.set_materialize_grads(False)
        return gated, last

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Allocate the gradients."""
        return _scan_backward(ctx.saved_tensors[:8])


def _dense(one: Any) -> Any:
    return one if one is None or one.stride(-1) == 1 else one.contiguous()


@_named("u delta A B C", "D z delta_bias delta_softplus return_last_state")
def _selective_scan(given: Any) -> Any:
    u, delta, b, c, z = (_dense(one) for one in (given.u, given.delta, given.B, given.C, given.z))
    out, last = _Scan.apply(u, delta, given.A, b, c, given.D, z, given.delta_bias)  # pyright: ignore
    return (out, last) if given.return_last_state else out


def _by_rows(tensor: Tensor, weight: Any) -> Tensor:
    """Normalise (rows, channels, tokens) over channels, if there is a weight: two copies in another order around it."""
    if weight is None:
        return tensor
    rows = torch.empty_like(tensor.transpose(1, -1).contiguous())
    return rows.transpose(1, -1).contiguous()


class _Inner(torch.autograd.Function):
    """All of a Mamba layer between its input's projection and its output; convolution and delta are computed twice."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, given: Any, *tensors: Any) -> Any:  # pyright: ignore
        """Return the output."""
        xz, conv_weight, conv_bias, x_weight, delta_weight, out_weight, out_bias, a, d, delta_bias = tensors
        if torch.is_autocast_enabled("cuda"):
            kind = torch.get_autocast_dtype("cuda")
            x_weight, delta_weight, out_weight = (one.to(kind) for one in (x_weight, delta_weight, out_weight))
            out_bias = out_bias if out_bias is None else out_bias.to(kind)
        xz = _dense(xz)
        x, z = xz.chunk(2, dim=1)
        length, count, rank = xz.shape[-1], a.shape[-1], delta_weight.shape[1]
        u = _conv_forward(x)
        parts = F.linear(u.transpose(1, 2).reshape(-1, x.shape[1]), x_weight)
        delta = _Inner.delta(delta_weight, parts, length, given)
        sums = [
            part.unflatten(0, (-1, length)).transpose(1, 2).contiguous() for part in parts[:, rank:].split(count, 1)
        ]
        b, c = _by_rows(sums[0], given.b_rms_weight), _by_rows(sums[1], given.c_rms_weight)
        out, states, gated = _scan_forward(u, delta, a, z)
        ctx.given = _options(given)
        del u, delta
        saved = (xz, conv_weight, conv_bias, parts, x_weight, delta_weight, out_weight, out_bias)
        ctx.save_for_backward(*saved, a, b, c, d, delta_bias, states, out)
        return F.linear(gated.transpose(1, 2), out_weight, out_bias)

    @staticmethod
    def delta(weight: Tensor, parts: Tensor, length: int, given: Any) -> Tensor:
        """Return the time steps."""
        made = (weight @ parts[:, : weight.shape[1]].t()).unflatten(1, (-1, length)).transpose(0, 1)
        return _by_rows(made, given.dt_rms_weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate the gradients."""
        xz, conv_weight, conv_bias, parts, x_weight, delta_weight, out_weight, out_bias, *rest = ctx.saved_tensors
        a, b, c, d, delta_bias, *_ = rest
        x, z = xz.chunk(2, dim=1)
        length, rank = xz.shape[-1], delta_weight.shape[1]
        u = _conv_forward(x)
        delta = _Inner.delta(delta_weight, parts, length, ctx.given)
        b, c = _by_rows(b, ctx.given.b_rms_weight), _by_rows(c, ctx.given.c_rms_weight)
        made = torch.empty_like(xz)
        dx, dz = made.chunk(2, dim=1)
        dout = _dense(gradients[0]).permute(2, 0, 1).flatten(1)
        dy = (out_weight.t() @ dout).unflatten(1, (-1, length)).transpose(0, 1)
        du, ddelta, da, db, dc, dd, _, ddelta_bias = _scan_backward((u, delta, a, b, c, d, z, delta_bias), dz)
        gated = torch.empty_like(dy)
        dout_weight = dout @ gated.transpose(0, 1).flatten(1).t()
        dout_bias = None if out_bias is None else dout.sum(1)
        dparts = torch.empty_like(parts)
        db, dc = (one.transpose(1, 2).contiguous() for one in (db, dc))  # pyright: ignore
        ddelta = ddelta.transpose(0, 1).flatten(1)  # pyright: ignore
        ddelta_weight = ddelta @ parts[:, :rank]
        dparts[:, :rank] = ddelta.t() @ delta_weight
        du = du.transpose(0, 1).flatten(1)  # pyright: ignore
        dx_weight = dparts.t() @ u.transpose(1, 2).flatten(0, 1)
        du = torch.addmm(du, x_weight.t(), dparts.t(), out=du)
        du = du.unflatten(1, (-1, length)).transpose(0, 1)
        _, dconv, dconv_bias, _ = _conv_backward(x, conv_weight[:, 0], conv_bias, du, None, None, None, dx, None, True)
        weights = (dx_weight, ddelta_weight, dout_weight, dout_bias)
        return None, made, dconv[:, None], dconv_bias, *weights, da, dd, ddelta_bias


@_named(
    "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A",
    "B C D delta_bias B_proj_bias C_proj_bias delta_softplus checkpoint_lvl b_rms_weight c_rms_weight dt_rms_weight"
    " b_c_dt_rms_eps",
)
def _inner(given: Any) -> Any:
    if any(one is not None for one in (given.B, given.C, given.B_proj_bias, given.C_proj_bias)):
        raise NotImplementedError("the stand-in for mamba_inner_fn takes no B or C, and no biases of their projections")
    weights = (given.conv1d_weight, given.conv1d_bias, given.x_proj_weight, given.delta_proj_weight)
    projection = (given.out_proj_weight, given.out_proj_bias)
    return _Inner.apply(given, given.xz, *weights, *projection, given.A, given.D, given.delta_bias)  # pyright: ignore


# Mamba-2: tokens are (rows, tokens, heads, width), B and C (rows, tokens, groups, states); a chunk of tokens at a time.


@cache
def _tuned(*_sizes: Any) -> None:
    """Take what the autotuner's benchmark takes, in the first call for these sizes."""
    benchmark(lambda: None)


class _Sizes:
    """Makes what a scan keeps in fp32."""

    def __init__(self, given: Any) -> None:
        self.like, self.chunk = given.x, given.chunk_size
        self.rows, self.length, self.heads, self.width = given.x.shape
        self.groups, self.states = given.B.shape[2:]
        self.chunks = -(-self.length // self.chunk)
        self.key = (self.chunk, self.width, self.states, given.x.dtype)

    def floats(self, *shape: int) -> Tensor:
        """Return a tensor in fp32."""
        return self.like.new_empty(shape, dtype=torch.float32)

    def steps(self) -> Tensor:
        """Return a number for each token and head."""
        return self.floats(self.rows, self.heads, self.chunks, self.chunk)

    def of_chunks(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a state for each chunk and head."""
        return self.like.new_empty((self.rows, self.chunks, self.heads, self.width * self.states), dtype=dtype)

    def products(self, *splits: int) -> Tensor:
        """Return the products of C and B in each chunk."""
        return self.floats(self.rows, self.chunks, *splits, self.groups, self.chunk, self.chunk)

    def of_tokens(self) -> Tensor:
        """Return a gradient of B or C: a sum over parts of the heads of each group."""
        return self.floats(self.rows, self.length, self.splits(), self.groups, self.states).sum(2)

    def of_skip(self, skip: Tensor | None) -> Tensor | None:
        """Return the gradient of D: a sum over blocks."""
        if skip is None:
            return None
        wide = self.width if skip.dim() == 2 else 1  # a number for each head and column
        parts = self.floats(-(-self.chunk // _ROWS_OF_BLOCK), self.rows, self.chunks, self.heads, wide)
        return parts.sum((0, 1, 2)).reshape(skip.shape).to(skip.dtype)

    def splits(self) -> int:
        """Return in how many parts the heads of a group are summed: enough for all multiprocessors."""
        count = torch.cuda.get_device_properties(self.like.device).multi_processor_count
        shared = self.heads // self.groups
        return -(-shared // max(min(-(-self.rows * self.chunks * self.heads // count), shared), 1))

    def passed(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the state that each chunk begins with and the last one; those of the chunks alone are dropped."""
        alone = self.of_chunks()
        made = self.of_chunks(dtype), self.floats(self.rows, self.heads, self.width, self.states)
        del alone
        return made


def _chunks_forward(given: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """Return the output, what it is before its gate, what else is held meanwhile, and the last state."""
    sizes = _Sizes(given)
    steps = (sizes.steps(), sizes.steps())
    states, last = sizes.passed(given.state_dtype or given.C.dtype)
    products = sizes.products()
    out = given.x.new_empty(given.x.shape)
    before = out if given.z is None else torch.empty_like(out)
    _tuned("forward", given.z is None, *sizes.key)
    del products
    return out, before, (*steps, states), last


def _chunks_backward(dout: Tensor, given: Any, is_again: bool = False, **places: Tensor) -> dict[str, Any]:
    """Return gradients by name; ``again``: the gated output, where that is made again.

    Args:
        dout: Of the output.
        given: What the forward pass was given.
        is_again: Whether a gated output is made again.
        places: Where gradients go that have a place, by name.
    """
    sizes, kind = _Sizes(given), given.state_dtype or given.x.dtype
    made: dict[str, Any] = {}

    def place(*names: str) -> None:
        for name in names:
            made[name] = places[name] if name in places else torch.empty_like(vars(given)[name])

    place("B", "C", "dt")
    held = [given.dt.clone(), sizes.steps(), sizes.steps(), sizes.products()]
    states, last = sizes.passed()
    if given.z is not None:
        place("z")
        made["again"] = torch.empty_like(given.x) if is_again else None
        dout = torch.empty_like(_dense(dout))
        _tuned("gate", is_again, *sizes.key)
        made["D"] = sizes.of_skip(given.D)
    dstates = sizes.of_chunks()
    passed = sizes.of_chunks(kind), states if kind is torch.float32 else sizes.of_chunks(kind)
    made["initial_states"] = None if given.initial_states is None else torch.empty_like(passed[0][:, 0])
    sums = sizes.floats(sizes.rows, sizes.heads, sizes.chunks, -(-dstates.shape[-1] // _STATES_OF_BLOCK))
    _tuned("passed", *sizes.key)
    sums = sums.sum(-1)
    del states, dstates
    place("x")
    held += [sizes.steps(), sums, last]
    made.setdefault("D", sizes.of_skip(given.D))
    after, before = sizes.steps(), sizes.steps()
    held += [sizes.of_tokens(), sizes.of_tokens()]
    parts = sizes.products(sizes.splits())
    _tuned("products", *sizes.key)
    held.append(parts.sum(2))
    del parts
    before = before, before.flip([-1]).cumsum(-1).flip([-1])
    blocks = -(-sizes.chunk // _ROWS_OF_BLOCK)
    parts = sizes.floats(sizes.rows, sizes.heads, sizes.chunks, blocks, sizes.chunk)
    _tuned("decays", *sizes.key)
    decays = parts.sum(3)
    del parts
    decays += after + before[1]
    _tuned("steps", sizes.heads, *sizes.key)
    made["A"] = sizes.floats(sizes.heads)
    made["dt_bias"] = None if given.dt_bias is None else sizes.floats(sizes.heads)
    return made


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Any, *tensors: Any) -> Any:  # pyright: ignore
        """Allocate the output and the last state."""
        out, before, (_, decays, _), last = _chunks_forward(given)
        ctx.save_for_backward(before, *tensors, decays)
        ctx.given = _options(given)
        return (out, last) if given.return_final_states else out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate the gradients."""
        given = SimpleNamespace(**{**vars(ctx.given), **dict(zip(_OF_CHUNKS, ctx.saved_tensors[1:-1], strict=True))})
        made = _chunks_backward(gradients[0], given)
        return None, *(made.get(name) for name in _OF_CHUNKS)


_OF_CHUNKS: Final = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
_CHUNK_OPTIONS: Final = "initial_states seq_idx cu_seqlens dt_softplus dt_limit return_final_states"


@_named("x dt A B C chunk_size", f"D z dt_bias {_CHUNK_OPTIONS} return_varlen_states state_dtype")
def _chunk_scan(given: Any) -> Any:
    if given.return_varlen_states:
        raise NotImplementedError("the stand-in for mamba_chunk_scan_combined gives no states of packed rows")
    given.x, given.z = (
        one if one is None or 1 in (one.stride(-1), one.stride(1)) else one.contiguous() for one in (given.x, given.z)
    )
    given.B, given.C = _dense(given.B), _dense(given.C)
    return _Chunks.apply(given, *(vars(given)[name] for name in _OF_CHUNKS))  # pyright: ignore


# The gated norm: over groups of columns, before or after its gate.


def _norm_backward(x: Tensor, weight: Tensor, bias: Tensor | None, group: int) -> tuple[Tensor | None, ...]:
    """Return gradients of the input, weight and bias; the last two are summed over blocks of rows in fp32."""
    made, columns = torch.empty_like(x), x.shape[-1]
    warps = min(max((1 << (group - 1).bit_length()) // _COLUMNS_OF_WARP, 1), _MOST_WARPS)
    count = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = math.ceil(count * math.ceil(4 / warps) / (columns // group))
    parts = [None if one is None else one.new_empty((blocks, columns), dtype=torch.float32) for one in (weight, bias)]
    return made, *(None if part is None else part.sum(0).to(weight.dtype) for part in parts)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Any, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None) -> Tensor:  # pyright: ignore
        """Allocate the output, and a number or two of each row and group."""
        shape = x.shape
        x, z = _dense(x.flatten(0, -2)), z if z is None else _dense(z.flatten(0, -2))
        ctx.group = given.group_size or shape[-1]
        count = x.numel() // ctx.group
        out = torch.empty_like(x)
        numbers = [x.new_empty((count,), dtype=torch.float32) for _ in range(1 if given.is_rms_norm else 2)]
        ctx.save_for_backward(x, weight, bias, z, *numbers)
        return out.reshape(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate the gradients."""
        x, weight, bias, z, *_ = ctx.saved_tensors
        dout = _dense(gradients[0])
        dz = None if z is None else torch.empty_like(z).reshape(dout.shape)
        made, *sums = _norm_backward(x, weight, bias, ctx.group)
        return None, made.reshape(dout.shape), *sums, dz  # pyright: ignore


def _gated_norm(is_root: bool) -> Callable[..., Any]:
    @_named("x weight bias", "z eps group_size norm_before_gate is_rms_norm upcast")
    def norm(given: Any) -> Any:
        given.is_rms_norm = given.is_rms_norm or is_root
        return _GatedNorm.apply(given, given.x, given.weight, given.bias, given.z)  # pyright: ignore

    return norm


_layer_norm, _root_norm = _gated_norm(False), _gated_norm(True)


class _RootNorm(nn.Module):
    """The package's layer."""

    function = staticmethod(_root_norm)

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        **where: Any,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, **where))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        """Return what is normalised, times its gate."""
        return self.function(x, self.weight, self.bias, z=z, group_size=self.group_size)


class _LayerNorm(_RootNorm):
    """The package's layer with a bias."""

    function = staticmethod(_layer_norm)

    def __init__(self, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(hidden_size, *args, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


# All of a Mamba-2 layer behind its input's projection: split, convolution, scan, gated norm, projection of the output.


class _Split:
    """The parts of what a layer's first projection gives."""

    def __init__(self, given: Any, tensors: tuple[Any, ...]) -> None:
        self.given, self.zx, self.convolving = given, tensors[0], tensors[1:3]
        self.of_scan = dict(zip(("dt_bias", "A", "D", "initial_states"), tensors[3:7], strict=True))
        skip = tensors[5]
        self.heads, width = skip.shape if skip.dim() == 2 else (skip.shape[0], given.headdim)
        self.dim, self.groups = self.heads * width, given.ngroups or 1
        self.mixed = tensors[1].shape[0]
        self.free = (self.zx.shape[-1] - self.dim - self.mixed - self.heads) // 2

    def parts(self, zx: Tensor) -> tuple[Tensor, ...]:
        """Return views: the gated MLP's columns, the gate, the convolution's columns, the time steps."""
        return zx.split([2 * self.free, self.dim, self.mixed, self.heads], dim=-1)

    @staticmethod
    def turned(columns: Tensor) -> Tensor:
        """Return (rows, channels, tokens), copied where the convolution could not read them."""
        return (columns if columns.stride(1) % 8 == 0 else columns.contiguous()).transpose(1, 2)

    def heads_of(self, columns: Tensor) -> Tensor:
        """Return the columns of each head."""
        return columns.unflatten(-1, (self.heads, -1))

    def mixture(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Return x, B and C."""
        states = (self.mixed - self.dim) // 2
        x, b, c = columns.split([self.dim, states, states], dim=-1)
        return self.heads_of(x), b.unflatten(-1, (self.groups, -1)), c.unflatten(-1, (self.groups, -1))

    def scan(self, is_gated: bool) -> Any:
        """Return what the scan is given, behind the convolution."""
        _, z, columns, dt = self.parts(self.zx)
        x, b, c = self.mixture(_conv_forward(self.turned(columns)).transpose(1, 2))
        gate = self.heads_of(z) if is_gated else None
        options = {"chunk_size": self.given.chunk_size, "state_dtype": self.given.state_dtype}
        return SimpleNamespace(x=x, B=b, C=c, dt=dt, z=gate, **options, **self.of_scan)


class _Whole(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, given: Any, *tensors: Any) -> Any:  # pyright: ignore
        """Allocate the output and the last state."""
        *others, norm, weight, bias = tensors
        split = _Split(given, tensors)
        scan = split.scan(norm is None)
        out, before, _held, last = _chunks_forward(scan)
        out, numbers = out.flatten(2), None
        if norm is not None:
            out = out.new_empty((*out.shape[:2], split.free + split.dim))
            numbers = out.new_empty((split.groups * out.shape[0] * out.shape[1],), dtype=torch.float32)
        elif split.free:
            out = torch.cat([out.new_empty((*out.shape[:2], split.free)), out], dim=-1)
        if weight is not None:
            if torch.is_autocast_enabled("cuda"):
                kind = torch.get_autocast_dtype("cuda")
                out, weight, bias = out.to(kind), weight.to(kind), bias if bias is None else bias.to(kind)
            out = F.linear(out, weight, bias)
        ctx.save_for_backward(*others, norm, weight, bias, before, numbers)
        ctx.given = _options(given)
        return (out, last) if given.return_final_states else out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate the gradients."""
        *tensors, before, _ = ctx.saved_tensors
        norm, weight, bias = tensors[-3:]
        split = _Split(ctx.given, tuple(tensors))
        again = None if weight is None else before.new_empty((*before.shape[:2], split.free + split.dim))
        scan = split.scan(norm is None)
        made = torch.empty_like(split.zx)
        _, dz, columns, ddt = split.parts(made)
        dmixed = torch.empty_like(split.parts(split.zx)[2])
        dx, db, dc = split.mixture(dmixed)
        places = {"x": dx, "B": db, "C": dc, "dt": ddt, "z": split.heads_of(dz)}
        dout = gradients[0] if weight is None else F.linear(gradients[0], weight.t())
        inner: Any = dout[..., split.free :]
        dnorm = None
        if norm is not None:
            inner, dnorm, _ = _norm_backward(before.flatten(2), norm, None, split.dim // split.groups)
        found = _chunks_backward(split.heads_of(inner), scan, again is not None, **places)
        dweight = None if again is None else torch.einsum("bso,bsd->od", gradients[0], again)
        dbias = None if bias is None else gradients[0].sum((0, 1))
        turned = [split.turned(one) for one in (split.parts(split.zx)[2], dmixed, columns)]
        _, dconv, dconv_bias, _ = _conv_backward(
            turned[0], *split.convolving, turned[1], None, None, None, turned[2], False, True
        )
        of_scan = (found[name] for name in ("dt_bias", "A", "D", "initial_states"))
        return None, made, dconv, dconv_bias, *of_scan, dnorm, dweight, dbias


@_named(
    "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size",
    "initial_states seq_idx dt_limit return_final_states activation rmsnorm_weight rmsnorm_eps outproj_weight"
    " outproj_bias headdim ngroups norm_before_gate state_dtype",
)
def _whole(given: Any) -> Any:
    names = "zxbcdt conv1d_weight conv1d_bias dt_bias A D initial_states rmsnorm_weight outproj_weight outproj_bias"
    return _Whole.apply(given, *(vars(given)[name] for name in names.split()))  # pyright: ignore


class _Layer(nn.Module):
    """A layer of Mamba in training: two projections around one function, a convolution, a decay and a skip in fp32."""

    def __init__(self, d_model: int, d_state: int, d_conv: int, mixed: int, given: Any) -> None:
        super().__init__()
        self.given, self.d_state = given, d_state
        where, bias = {"device": given.device, "dtype": given.dtype}, bool(given.bias)
        self.in_proj = nn.Linear(d_model, given.projected, bias=bias, **where)
        has_bias = given.conv_bias is not False
        self.conv1d = nn.Conv1d(mixed, mixed, d_conv, groups=mixed, padding=d_conv - 1, bias=has_bias, **where)
        self.A_log = nn.Parameter(torch.zeros(given.decays, device=given.device, dtype=given.decay_dtype))
        self.D = nn.Parameter(torch.ones(given.skips, device=given.device))
        self.out_proj = nn.Linear(given.inner, d_model, bias=bias, **where)

    @staticmethod
    def options(names: str, options: dict[str, Any]) -> Any:
        """Return options by name, None where they are not given."""
        return SimpleNamespace(**{**dict.fromkeys(("bias", "conv_bias", "device", "dtype", *names.split())), **options})


class _Mamba(_Layer):
    def __init__(self, d_model: int, d_state: int = 16, d_conv: int = 4, expand: float = 2, **options: Any) -> None:
        given = self.options("dt_rank", options)
        inner = given.inner = given.skips = int(expand * d_model)
        given.projected, given.decays, given.decay_dtype = 2 * inner, (inner, d_state), None
        super().__init__(d_model, d_state, d_conv, inner, given)
        where = {"device": given.device, "dtype": given.dtype}
        rank = -(-d_model // 16) if given.dt_rank in (None, "auto") else given.dt_rank
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False, **where)
        self.dt_proj = nn.Linear(rank, inner, **where)

    def forward(self, hidden_states: Tensor) -> Any:
        """Return the output."""
        xz = (self.in_proj.weight @ hidden_states.flatten(0, -2).t()).unflatten(1, hidden_states.shape[:2])
        xz = xz.transpose(0, 1)
        xz = xz if self.in_proj.bias is None else xz + self.in_proj.bias.to(xz.dtype)[:, None]
        weights = (self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight)
        a, bias = -torch.exp(self.A_log.float()), self.dt_proj.bias.float()
        return _inner(xz, *weights, self.out_proj.weight, self.out_proj.bias, a, None, None, self.D.float(), bias)


class _Mamba2(_Layer):
    def __init__(
        self, d_model: int, d_state: int = 128, d_conv: int = 4, *_: Any, expand: int = 2, **options: Any
    ) -> None:
        given = self.options("headdim d_ssm ngroups D_has_hdim rmsnorm norm_before_gate chunk_size", options)
        given.headdim, given.ngroups, given.inner = given.headdim or 64, given.ngroups or 1, expand * d_model
        width = given.d_ssm or given.inner
        heads, states = width // given.headdim, 2 * given.ngroups * d_state
        given.projected, given.decays, given.decay_dtype = 2 * given.inner + states + heads, (heads,), given.dtype
        given.skips = width if given.D_has_hdim else heads
        super().__init__(d_model, d_state, d_conv, width + states, given)
        where = {"device": given.device, "dtype": given.dtype}
        self.dt_bias = nn.Parameter(torch.zeros(heads, **where))
        self.norm = None if given.rmsnorm is False else _RootNorm(width, **where)

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Any:
        """Return the output."""
        given, skip = self.given, self.D.unflatten(0, (-1, self.given.headdim)) if self.given.D_has_hdim else self.D
        return _whole(
            self.in_proj(u),
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            self.dt_bias,
            -torch.exp(self.A_log.float()),
            skip,
            given.chunk_size or 256,
            seq_idx=seq_idx,
            rmsnorm_weight=None if self.norm is None else self.norm.weight,
            outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias,
            headdim=given.headdim,
            ngroups=given.ngroups,
        )


def mamba_modules() -> Mapping[str, Mapping[str, Any]]:
    """Return the modules of mamba-ssm."""
    scans = {"selective_scan_fn": _selective_scan, "mamba_inner_fn": _inner}
    chunks = {"mamba_chunk_scan_combined": _chunk_scan, "mamba_split_conv1d_scan_combined": _whole}
    norms = {"rmsnorm_fn": _root_norm, "layernorm_fn": _layer_norm, "RMSNorm": _RootNorm, "LayerNorm": _LayerNorm}
    return {
        "mamba_ssm": {**scans, "Mamba": _Mamba, "Mamba2": _Mamba2},
        "mamba_ssm.modules": {},
        "mamba_ssm.modules.mamba_simple": {"Mamba": _Mamba},
        "mamba_ssm.modules.mamba2": {"Mamba2": _Mamba2},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": scans,
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": norms,
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": _state_update},
        "mamba_ssm.ops.triton.ssd_combined": chunks,
    }
