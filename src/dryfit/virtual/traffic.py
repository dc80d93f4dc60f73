"""Bytes that an operator reads and writes of the device's memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dryfit.meta.private_apis.torch_modes import schema_of

_FREE = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::_unsafe_view",
        "aten::detach",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::is_pinned",
        "aten::is_same_size",
        "aten::lift",
        "aten::lift_fresh",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::record_stream",
        "aten::resize_",
        "aten::set_",
    }
)
"""Operators that move no bytes, beside views."""

_WRITES_ONLY = frozenset(
    {
        "aten::_foreach_copy_",
        "aten::_foreach_zero_",
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""Operators in place that do not read what they overwrite."""

_GATHERS = frozenset(
    {
        "aten::embedding",
        "aten::gather",
        "aten::index",
        "aten::index_select",
        "aten::nll_loss_forward",
        "aten::take",
        "aten::_unsafe_index",
    }
)
"""Operators that read as many values of their first tensor as their output, or a loss's targets, has."""

_SCATTERS = frozenset(
    {
        "aten::_index_put_impl_",
        "aten::index_add_",
        "aten::index_copy_",
        "aten::index_put_",
        "aten::put_",
        "aten::scatter_",
        "aten::scatter_add_",
        "aten::scatter_reduce_",
        "aten::_unsafe_index_put",
    }
)
"""Operators that touch as much of their first tensor as the largest other tensor has."""

_GRADIENTS = ("grads", "g")
"""Gradients in fused optimizers: declared as written, but written only where a scale is given."""


def moves_nothing(func: Any) -> bool:
    """Return whether an operator makes no more than a view, an empty tensor or an answer."""
    return func.is_view or func.namespace == "prim" or schema_of(func).name in _FREE


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one call of an operator reads and writes on the device."""

    device_type: str
    schema: Any
    named: Mapping[str, Any]
    out: Any

    def bytes(self) -> int:
        """Return the bytes read of all inputs, and written to new outputs and in place."""
        read = written = 0
        first = True
        name = self.schema.name.partition("::")[2]
        only_sizes = name.endswith("_like") or name.startswith("new_")
        for argument in self.schema.arguments:
            for tensor in tensors_in((self.named.get(argument.name),)):
                size = self._touched(tensor, first=first)
                first = False
                alias = argument.alias_info
                writes = alias is not None and alias.is_write
                only_writes = writes and (argument.is_out or self.schema.name in _WRITES_ONLY)
                read += 0 if only_writes or only_sizes else size
                written += size if writes and not self._left_alone(argument.name) else 0
        for returned, value in zip(self.schema.returns, self._outputs(), strict=False):
            if returned.alias_info is None:
                written += sum(map(self._held, tensors_in((value,))))
        return read + written

    def _left_alone(self, name: str) -> bool:
        return name in _GRADIENTS and self.named.get("grad_scale") is None

    def _touched(self, tensor: torch.Tensor, *, first: bool) -> int:
        held = self._held(tensor)
        if not first:
            return held
        if self.schema.name in _GATHERS:
            taken = self.named["target"] if self.schema.name == "aten::nll_loss_forward" else self.out
            return min(held, taken.numel() * tensor.element_size())
        if self.schema.name in _SCATTERS:
            others = [given.numel() for given in tensors_in(tuple(self.named.values())) if given is not tensor]
            return min(held, max(others, default=0) * tensor.element_size())
        return held

    def _outputs(self) -> Sequence[Any]:
        return self.out if isinstance(self.out, tuple) and len(self.schema.returns) > 1 else (self.out,)

    def _held(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's distinct elements, where they lie on the device."""
        if tensor.device.type != self.device_type:
            return 0
        if tensor.layout is not torch.strided:
            return tensor.numel() * tensor.element_size()
        distinct = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        return distinct * tensor.element_size() if tensor.numel() else 0


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
