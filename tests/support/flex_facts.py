"""Flex attention on a virtual GPU, forwards and backwards, beside SDPA's flash kernel."""

import json
from collections.abc import Callable

import torch
from torch import nn

import dryfit

SHAPE = (2, 8, 1024, 64)


def steps(attend: Callable[..., torch.Tensor], kv_heads: int = 8) -> list[int]:
    """Bytes that attention keeps after its forward pass, and with its gradients."""
    query = torch.zeros(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    keys, values = (torch.zeros((2, kv_heads, *SHAPE[2:]), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = torch.cuda.memory_allocated()
    out = attend(query, keys.requires_grad_(), values.requires_grad_())
    kept = torch.cuda.memory_allocated() - before
    out.backward(torch.empty_like(out))
    del out
    return [kept, torch.cuda.memory_allocated() - before]


with dryfit.virtual_gpu("a100-80") as gpu:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
    compiled = torch.compile(flex_attention)
    print(
        json.dumps(
            {
                "flex": steps(lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, *_: s * 2, block_mask=mask)),
                "compiled": steps(lambda q, k, v: compiled(q, k, v, block_mask=mask)),
                "grouped": steps(lambda q, k, v: compiled(q, k, v, enable_gqa=True, return_lse=True)[0], 2),
                "sdpa": steps(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
                "notes": gpu.notes,
            }
        )
    )
