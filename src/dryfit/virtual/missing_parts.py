"""Packages that need a GPU to be built or used: what stands in for one, and what is said where one is missing.

A model of transformers that asks for flash attention by name is rehearsed with torch's own flash kernel, which keeps
the same tensors; rows are not unpadded. No package is made up: a script that looks whether one is there sees this
machine as it is.
"""

from collections.abc import Callable
from typing import Any

import torch

from dryfit.meta.private_apis.transformers_steps import let_flash_attention
from dryfit.virtual.import_hooks import when_imported

_NAME = "flash_attention_2"
_NOTE = "{} is rehearsed with the flash kernel of torch's scaled_dot_product_attention, without unpadding"
_SERVES = {
    "flash_attn": 'attn_implementation="flash_attention_2" of transformers, or torch\'s scaled_dot_product_attention',
    "flash_attn_interface": "torch's scaled_dot_product_attention",
    "xformers": "torch's scaled_dot_product_attention",
    "triton": "pip install triton: its kernels are followed without a GPU",
    "liger_kernel": "pip install --no-deps liger-kernel triton",
    "bitsandbytes": "pip install --no-deps bitsandbytes",
    "apex": "torch.amp and torch.optim",
}
"""By package, what serves in its place, or how it comes without a GPU."""


def install(note: Callable[[str], None]) -> None:
    """Let models of transformers ask for flash attention by name.

    Args:
        note: Called with a remark where one does.
    """

    def on_ask(name: str) -> None:
        note(_NOTE.format(name))

    when_imported("transformers.modeling_utils", lambda module: let_flash_attention(module, _NAME, _by_torch, on_ask))


def lack(error: ImportError) -> str:
    """Return what is said of a script that ended because it could not import something."""
    package = (error.name or "").partition(".")[0]
    serves = f"; what serves: {_SERVES[package]}" if package in _SERVES else ""
    return f"this machine lacks what the script imports: {str(error).strip().partition(chr(10))[0]}{serves}"


def _by_torch(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend as the flash kernel does, which sees no mask but a causal one, and needs no copies of grouped heads."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=kwargs.get("dropout", 0.0) or 0.0,
        is_causal=bool(is_causal) and query.shape[2] > 1,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None
