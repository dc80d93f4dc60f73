"""What the kernels of other packages take on a virtual GPU, each as JSON: kept, forward peak, backward peak.

The packages are not installed: their stand-ins are there because nothing guards the imports. Liger Kernel is measured
where it is installed (``liger`` as the argument).
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import dryfit

ROWS, TOKENS, HEADS, WIDTH = 4, 1024, 16, 64
facts: dict[str, Any] = {}


def made(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(*shape, device="cuda", dtype=dtype or torch.bfloat16, requires_grad=True)


def measure(name: str, call: Callable[..., Any], *given: Any) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*given)
    kept, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    outs = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
    gradients = [torch.empty_like(one) for one in outs]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.backward(outs, gradients)
    facts[name] = [kept, most, torch.cuda.max_memory_allocated() - before]
    assert all(one.grad is None or one.grad.shape == one.shape for one in given)
    for one in given:
        one.grad = None


def attention() -> None:
    import flash_attn
    import flash_attn_interface
    from flash_attn.bert_padding import pad_input, unpad_input
    from xformers.ops import LowerTriangularMask, memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask

    dense = (ROWS, TOKENS, HEADS, WIDTH)
    measure("dense", lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), *(made(*dense) for _ in "qkv"))
    few = (ROWS, TOKENS, HEADS // 4, WIDTH)
    measure("few heads", flash_attn.flash_attn_func, made(*dense), made(*few), made(*few))
    measure("packed", flash_attn.flash_attn_qkvpacked_func, made(ROWS, TOKENS, 3, HEADS, WIDTH))
    measure("packed keys", flash_attn.flash_attn_kvpacked_func, made(*dense), made(ROWS, TOKENS, 2, HEADS, WIDTH))
    begins = torch.tensor([0, 1000, 1500, 4096], dtype=torch.int32, device="cuda")
    flat = (ROWS * TOKENS, HEADS, WIDTH)
    longest = (begins, begins, 2596, 2596)
    measure(
        "other lengths", lambda *qkv: flash_attn.flash_attn_varlen_func(*qkv, *longest), *(made(*flat) for _ in "qkv")
    )
    measure(
        "third", lambda *qkv: flash_attn_interface.flash_attn_func(*qkv, causal=True), *(made(*dense) for _ in "qkv")
    )
    measure(
        "blocks",
        lambda *qkv: memory_efficient_attention(*qkv, BlockDiagonalCausalMask.from_seqlens([1000, 500, 2596])),
        *(made(1, *flat) for _ in "qkv"),
    )
    measure(
        "triangle", lambda *qkv: memory_efficient_attention(*qkv, LowerTriangularMask()), *(made(*dense) for _ in "qkv")
    )
    measure("single", memory_efficient_attention, *(made(*dense, dtype=torch.float32) for _ in "qkv"))
    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    tables = [torch.empty(TOKENS, WIDTH // 2, device="cuda", dtype=torch.bfloat16) for _ in ("cos", "sin")]
    for in_place in (False, True):
        turn = lambda x, inplace=in_place: apply_rotary_emb(x, *tables, inplace=inplace)  # noqa: E731
        measure(f"rotary in place {in_place}", turn, made(*dense))
    rows = (ROWS * TOKENS, HEADS * WIDTH)
    measure("layer norm", layer_norm_fn, made(*rows), made(rows[1]), made(rows[1]))
    residual = made(*rows, dtype=torch.float32)
    added = lambda x, weight, residual: rms_norm_fn(x, weight, None, residual, prenorm=True)  # noqa: E731
    measure("residual norm", added, made(*rows), made(rows[1]), residual)
    labels = torch.zeros(ROWS * TOKENS, dtype=torch.long, device="cuda")
    measure("loss", lambda logits: cross_entropy_loss(logits, labels), made(ROWS * TOKENS, 32000))
    facts["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long, device="cuda")
    mask[0, TOKENS // 2 :] = 0
    taken, indices, starts, most, used = unpad_input(made(ROWS, TOKENS, 8), mask)
    facts["unpadded"] = [list(taken.shape), starts.tolist(), most, used.tolist()]
    facts["padded"] = list(pad_input(taken, indices, ROWS, TOKENS).shape)
    try:
        flash_attn.flash_attn_func(*3 * [torch.zeros(1, 8, 2, 64, device="cuda")])
    except RuntimeError as error:
        facts["fp32"] = str(error)

    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=99, dtype=torch.bfloat16, **sizes)
    for name in ("flash_attention_2", "flash_attention_3"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name).cuda()
        ids, mask = torch.ones(2, 32, dtype=torch.long), torch.ones(2, 32, dtype=torch.long)
        mask[0, 20:] = 0
        out = model(ids.cuda(), attention_mask=mask.cuda(), labels=ids.cuda())
        out.loss.backward()
        facts[name] = list(out.logits.shape)
    mask, side = BlockDiagonalMask.from_tensor_list([made(1, 1000, HEADS, WIDTH), made(2, 500, HEADS, WIDTH)])
    facts["listed"] = [list(side.shape), *(list(one.shape) for one in mask.make_causal().split(side))]
    in_32_bits = [made(1, *flat, dtype=torch.float32) for _ in "qkv"]
    blocks = BlockDiagonalMask.from_seqlens([1000, 500, 2596])
    measure("blocks in 32 bits", lambda *qkv: memory_efficient_attention(*qkv, blocks), *in_32_bits)


def others() -> None:
    from apex.normalization import FusedLayerNorm, FusedRMSNorm
    from causal_conv1d import causal_conv1d_fn
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    from transformer_engine.pytorch import RMSNorm

    channels, states = 512, 16
    tokens = (ROWS, channels, TOKENS)
    measure("convolution", causal_conv1d_fn, made(*tokens), made(channels, 4), made(channels))
    sums = [made(ROWS, states, TOKENS) for _ in "BC"]
    numbers = [made(channels, dtype=torch.float32) for _ in ("D", "bias")]
    decay = made(channels, states, dtype=torch.float32)
    scan = lambda u, delta, a, b, c, d, z, bias: selective_scan_fn(u, delta, a, b, c, d, z, bias, True)  # noqa: E731
    measure("scan", scan, made(*tokens), made(*tokens), decay, *sums, numbers[0], made(*tokens), numbers[1])
    mixed(tokens)
    for norm in (FusedLayerNorm(1024).to("cuda", torch.bfloat16), FusedRMSNorm(1024).to("cuda", torch.bfloat16)):
        measure(type(norm).__mro__[1].__name__, norm, made(ROWS, TOKENS, 1024))
    facts["engine"] = str(RMSNorm(1024).weight.device)


def mixed(tokens: tuple[int, ...]) -> None:
    """Mamba-2's scan in 4 chunks of 256 tokens, 128 states, one group; and whole layers of both Mambas."""
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn
    from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

    (made(8, 8) @ made(8, 8)).sum().backward()  # makes cuBLAS's workspaces
    inner, states = HEADS * WIDTH, 128
    dense, shared = (ROWS, TOKENS, HEADS, WIDTH), (ROWS, TOKENS, 1, states)
    decays = [made(HEADS, dtype=torch.float32) for _ in ("A", "D", "bias")]
    scan = lambda x, dt, b, c, a, d, bias: mamba_chunk_scan_combined(x, dt, a, b, c, 256, D=d, dt_bias=bias)  # noqa: E731
    given = (made(*dense), made(ROWS, TOKENS, HEADS), made(*shared), made(*shared), *decays)
    measure("tuned chunks", scan, *given)
    measure("chunks", scan, *given)
    norm = RMSNorm(inner, norm_before_gate=False, device="cuda", dtype=torch.bfloat16)
    measure("gated norm", norm, made(ROWS, TOKENS, inner), made(ROWS, TOKENS, inner))
    channels = inner + 2 * states
    projected = made(ROWS, TOKENS, inner + channels + HEADS)
    whole = lambda zx, weight, bias, a, d, dt, norm, out: mamba_split_conv1d_scan_combined(  # noqa: E731
        zx, weight, bias, dt, a, d, 256, rmsnorm_weight=norm, outproj_weight=out, headdim=WIDTH
    )
    weights = (made(inner), made(512, inner))
    measure("whole", whole, projected, made(channels, 4), made(channels), *decays, *weights)
    _, channels, length = tokens
    parts = (made(64, channels), made(channels, 32), made(512, channels))
    layer = lambda xz, weight, x, delta, out, a, d: mamba_inner_fn(xz, weight, None, x, delta, out, None, a, D=d)  # noqa: E731
    numbers = (made(channels, 16, dtype=torch.float32), made(channels, dtype=torch.float32))
    measure("inner", layer, made(ROWS, 2 * channels, length), made(channels, 1, 4), *parts, *numbers)


def liger() -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    norm = lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True)  # noqa: E731
    measure("norm", norm, made(4, 2048, 1024), made(1024))
    measure("swiglu", LigerSiLUMulFunction.apply, made(4, 2048, 2816), made(4, 2048, 2816))
    turns = [torch.empty(1, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in ("cos", "sin")]
    rope = lambda q, k: LigerRopeFunction.apply(q, k, *turns)  # noqa: E731
    measure("rope", rope, made(4, 16, 2048, 64), made(4, 4, 2048, 64))
    labels = torch.arange(8192, device="cuda")
    loss = lambda x, weight: LigerFusedLinearCrossEntropyFunction.apply(x, weight, labels)[0]  # noqa: E731
    measure("loss", loss, made(8192, 1024), made(32000, 1024))


with dryfit.virtual_gpu("a100-80") as gpu:
    import torch

    {"attention": attention, "others": others, "liger": liger}[sys.argv[1]]()
    facts["assumed"] = [one.partition(" ")[0] for one in gpu.assumed]
print(json.dumps(facts))
