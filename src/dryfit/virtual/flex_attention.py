"""Flex attention on a virtual GPU: the memory of its fused kernel, whatever its scores and masks are."""

from collections.abc import Callable
from typing import Any

import torch

from dryfit.meta.private_apis.torch_virtual import stand_in
from dryfit.virtual.import_hooks import rebind, when_imported

_NOTE = "flex_attention: counted as its compiled kernel takes it; its arithmetic is not counted"


class _Attention(torch.autograd.Function):
    """Keeps what the kernel keeps: queries, keys and values, the output, and a sum in fp32 of each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:  # pyright: ignore
        """Allocate the output and the sums."""
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Allocate the products of outputs and their gradients, summed by row, and the gradients."""
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def install(note: Callable[[str], None]) -> None:
    """Take the place of ``torch.nn.attention.flex_attention`` on the device.

    Args:
        note: Called with a remark where it is used.
    """

    def replace(module: Any) -> None:
        replaced = module.flex_attention

        def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not query.is_cuda:
                return replaced(query, key, value, *args, **kwargs)
            note(_NOTE)
            given = (query, key, value)
            if torch.is_autocast_enabled("cuda"):
                given = tuple(one.to(torch.get_autocast_dtype("cuda")) for one in given)
            out, sums = _Attention.apply(*given)  # pyright: ignore[reportGeneralTypeIssues]
            if kwargs.get("return_aux") is not None:
                return out, module.AuxOutput(lse=sums, max_scores=None)
            return (out, sums) if kwargs.get("return_lse") else out

        rebind(replaced, stand_in(attention, replaced))

    when_imported("torch.nn.attention.flex_attention", replace)
