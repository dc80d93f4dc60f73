"""What CUDA kernels take beside their operators' outputs, next to the formulas of dryfit.gpu.kernels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dryfit.gpu.kernels import scratch_blocks

aten = torch.ops.aten
BLOCK_BYTES = 512


@dataclass(frozen=True)
class Call:
    """An operator with its arguments."""

    name: str
    func: Any
    args: tuple[Any, ...]


def calls(device: str) -> Iterator[tuple[str, Callable[[], Call]]]:
    """The grid: names, and how to make the arguments."""
    for rows, heads, length, width in ((16, 12, 512, 64), (4, 16, 2048, 64), (2, 14, 512, 128), (1, 8, 500, 96)):
        shape = f"{rows}x{heads}x{length}x{width}"
        yield f"flash backward {shape}", lambda s=(rows, heads, length, width): flash(s, device)
        for dtype in (torch.bfloat16, torch.float32):
            name = f"efficient backward {shape} {str(dtype)[6:]}"
            yield name, lambda s=(rows, heads, length, width), d=dtype: efficient(s, d, device)
    yield "efficient backward 2x8x512x192 bfloat16", lambda: efficient((2, 8, 512, 192), torch.bfloat16, device)
    for rows, width in ((1024, 768), (8192, 768), (8192, 1024), (2048, 4096), (65536, 768)):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"layer norm backward {rows}x{width} {str(dtype)[6:]}"
            yield name, lambda r=rows, w=width, d=dtype: layer_norm(r, w, d, device)
    for count, words in ((512, 30522), (3072, 30522), (3073, 30522), (8192, 30522), (8192, 151936), (65536, 30522)):
        yield f"embedding backward {count} of {words}", lambda c=count, w=words: embedding(c, w, device)
    for rows, words in ((2048, 32000), (2048, 151936), (8192, 50257)):
        yield f"log softmax backward {rows}x{words}", lambda r=rows, w=words: log_softmax(r, w, device)
        yield f"nll loss {rows}x{words}", lambda r=rows, w=words: nll(r, w, device)
    for tensors in (200, 400):
        yield f"foreach norm of {tensors}", lambda t=tensors: foreach_norm(t, device)


def as_in_layers(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows, heads, length, width: in memory length comes before heads, as layers have them."""
    rows, heads, length, width = shape
    return torch.empty((rows, length, heads, width), dtype=dtype, device=device).fill_(0.01).transpose(1, 2)


def flash(shape: tuple[int, int, int, int], device: str) -> Call:
    q, k, v, grad = (as_in_layers(shape, torch.bfloat16, device) for _ in range(4))
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.1)
    args = (grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.1, False, seed, offset)
    return Call("flash backward", aten._scaled_dot_product_flash_attention_backward.default, args)


def efficient(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Call:
    rows, heads, length, _ = shape
    q, k, v, grad = (as_in_layers(shape, dtype, device) for _ in range(4))
    aligned = -(-length // 16) * 16
    bias = torch.empty((rows, heads, length, aligned), dtype=dtype, device=device).fill_(0)[..., :length]
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.1)
    args = (grad, q, k, v, bias, out, lse, seed, offset, 0.1, [True, True, True, False])
    return Call("efficient backward", aten._scaled_dot_product_efficient_attention_backward.default, args)


def layer_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
    x, grad = (torch.empty(rows, width, dtype=dtype, device=device).fill_(0.01) for _ in range(2))
    weight, bias = (torch.empty(width, dtype=dtype, device=device).fill_(1) for _ in range(2))
    _, mean, rstd = aten.native_layer_norm(x, [width], weight, bias, 1e-5)
    args = (grad, x, [width], mean, rstd, weight, bias, [True, True, True])
    return Call("layer norm backward", aten.native_layer_norm_backward.default, args)


def embedding(count: int, words: int, device: str) -> Call:
    grad = torch.empty(count, 768, device=device).fill_(0.01)
    indices = torch.arange(count, device=device) % words
    return Call("embedding backward", aten.embedding_dense_backward.default, (grad, indices, words, -1, False))


def log_softmax(rows: int, words: int, device: str) -> Call:
    out, grad = (torch.empty(rows, words, device=device).fill_(0.01) for _ in range(2))
    return Call("log softmax backward", aten._log_softmax_backward_data.default, (grad, out, 1, torch.float32))


def nll(rows: int, words: int, device: str) -> Call:
    scores = torch.empty(rows, words, device=device).fill_(-1)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    return Call("nll loss", aten.nll_loss_forward.default, (scores, target, None, 2, -100))


def foreach_norm(tensors: int, device: str) -> Call:
    values = [torch.empty(768, 768, device=device).fill_(0.01) for _ in range(tensors)]
    return Call("foreach norm", aten._foreach_norm.Scalar, (values, 2))


def measure(call: Call) -> tuple[int, int]:
    """What a call takes beyond its outputs on the device, and what the formula says.

    The call is made twice: what is made once and kept does not count.
    """
    del_me = call.func(*call.args)
    del del_me
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call.func(*call.args)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    storages = {leaf.untyped_storage().data_ptr(): leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
    outputs = sum(-(-leaf.untyped_storage().nbytes() // BLOCK_BYTES) * BLOCK_BYTES for leaf in storages.values())
    return max(0, peak - outputs), sum(scratch_blocks(call.func, call.args, out))


def rows(device: str) -> list[dict[str, Any]]:
    """The whole table; on ``meta`` only the formulas."""
    found = []
    for name, make in calls(device):
        call = make()
        if device == "meta":
            measured, formula = None, sum(scratch_blocks(call.func, call.args, call.func(*call.args)))
        else:
            try:
                measured, formula = measure(call)
            except RuntimeError as error:  # a kernel that this device has not
                found.append({"kernel": name, "error": str(error).splitlines()[0]})
                continue
        found.append({"kernel": name, "measured_bytes": measured, "formula_bytes": formula})
        del call
    return found
