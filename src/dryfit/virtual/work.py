"""Arithmetic and memory traffic of a training step, operator by operator, and the least time a device needs for them.

FLOPs are those of matrix products, convolutions and attention, by the formulas that ``torch.utils.flop_counter`` keeps
(also those that other libraries register there): a multiplication and an addition are two, and recomputed activations
count as they are computed. Bytes are what an operator reads and writes of the device's memory: a view is nothing, an
expanded tensor is what it holds, a gather reads what it gives. Copies over the bus to or from the host count for what
they touch on the device alone.

The least time is the roofline: by operator, the longer of arithmetic and traffic at the device's published peaks
(``core/settings/known_devices.py``), as if each kernel found its inputs in the device's memory and not in its cache. Of
causal attention, whose FLOPs are counted whole as everywhere, only the part below the diagonal takes time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dryfit.core.jobs.rehearsal import StepWork
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.settings.known_devices import KnownGpu, ProductPrecision, device_rates
from dryfit.meta.private_apis.torch_modes import schema_of
from dryfit.virtual.flops import flops_of, timed_flops
from dryfit.virtual.traffic import Traffic, moves_nothing, tensors_in

_HALVES = {torch.float16: ProductPrecision.FP16, torch.bfloat16: ProductPrecision.BF16}


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one operator on given shapes costs.

    Attributes:
        timed_flops: The part of ``flops`` that a kernel cannot leave out.
    """

    flops: int
    timed_flops: int
    bytes: int
    precision: ProductPrecision

    def least_s(self, rates: KnownGpu, capability: tuple[int, int]) -> float:
        arithmetic_s = self.timed_flops / rates.flops_per_s(self.precision, capability)
        return max(arithmetic_s, self.bytes / rates.bytes_per_s)


class WorkCounter:
    """Adds up what the operators of each optimizer step cost."""

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._free: dict[Any, bool] = {}
        self._costs: dict[Any, _Cost] = {}
        self._running: Counter[_Cost] = Counter()
        self._last: Counter[_Cost] | None = None

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Add an operator that ran, with what it was given and what it gave."""
        free = self._free.get(func)
        if free is None:
            free = self._free[func] = moves_nothing(func)
        if free:
            return
        key = (func, *map(_signed, args), _signed(out))
        if kwargs:
            key += tuple(map(_signed, kwargs.values()))
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = self._cost(func, args, kwargs, out)
        if cost.flops and cost.precision is ProductPrecision.FP32 and _allows_tf32(func):
            cost = replace(cost, precision=ProductPrecision.TF32)
        self._running[cost] += 1

    def so_far(self) -> "Counter[_Cost]":
        """Return what was noted in the current step until now."""
        return self._running.copy()

    def add(self, costs: "Counter[_Cost]") -> None:
        """Count work that was not run."""
        self._running.update(costs)

    def step_ends(self) -> None:
        """Close an optimizer step: all that was noted since the last one was its work."""
        self._last, self._running = self._running, Counter()

    def work(self, device: DeviceSpec) -> StepWork | None:
        """Return the work of the last full step and the least time a device needs for it; None before any."""
        if self._last is None:
            return None
        rates = device_rates(device)
        flops = sum(cost.flops * times for cost, times in self._last.items())
        moved_bytes = sum(cost.bytes * times for cost, times in self._last.items())
        if rates is None:
            why = f"none: no rates are published for {device.name}; name a GPU to have the least time of a step"
            return StepWork(flops_per_step=flops, bytes_per_step=moved_bytes, rates=why)
        least_s = sum(cost.least_s(rates, device.capability) * times for cost, times in self._last.items())
        return StepWork(
            flops_per_step=flops,
            bytes_per_step=moved_bytes,
            least_step_s=least_s,
            rates=_told(rates, {cost.precision for cost in self._last if cost.flops}, device.capability),
        )

    def _cost(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> _Cost:
        schema = schema_of(func)
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        flops = flops_of(func, args, kwargs, out)
        return _Cost(
            flops=flops,
            timed_flops=timed_flops(flops, schema.name, named),
            bytes=Traffic(self._device_type, schema, named, out).bytes(),
            precision=_precision(args, kwargs),
        )


def _signed(value: Any) -> Any:
    """Return what a cost may depend on of an argument, as a part of a key."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return (value.shape, strides, value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(map(_signed, value))
    return value if isinstance(value, bool | int | str | torch.dtype | None) else type(value)


def _precision(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductPrecision:
    """Return what a product is computed in, by the type of its first matrix."""
    for tensor in tensors_in((*args, *kwargs.values())):
        if tensor.dim() >= 2:
            if tensor.dtype in _HALVES:
                return _HALVES[tensor.dtype]
            return ProductPrecision.EIGHT_BIT if tensor.dtype.itemsize == 1 else ProductPrecision.FP32
    return ProductPrecision.FP32


def _allows_tf32(func: Any) -> bool:
    """Return whether the script's settings, as they are now, let a product in fp32 be computed in TF32."""
    if "convolution" in schema_of(func).name:
        return torch.backends.cudnn.allow_tf32
    return torch.get_float32_matmul_precision() != "highest"


def _told(rates: KnownGpu, precisions: set[ProductPrecision], capability: tuple[int, int]) -> str:
    used = ", ".join(
        f"{rates.flops_per_s(precision, capability) / 1e12:g} TFLOP/s in {precision}"
        for precision in sorted(precisions)
    )
    return (
        f"{used + ', ' if used else ''}{rates.bandwidth_gb_s:g} GB/s: published peaks without sparsity, {rates.source}"
    )
