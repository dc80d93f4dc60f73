"""Arithmetic, memory traffic and least time of a training step, operator by operator."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dryfit.gpu import recurrent
from dryfit.gpu.kinds import Kind, attention_sizes, kind_of, sizes_of
from dryfit.gpu.private_apis.torch_modes import schema_of
from dryfit.gpu.step_time import Operation, Timing, fitted_reach, step_time
from dryfit.gpu.values import value_of
from dryfit.settings.device_reach import DeviceReach, device_link, device_reach
from dryfit.settings.devices import KnownGpu, ProductPrecision, device_rates, known_name
from dryfit.settings.memory_terms import DeviceSpec, StepPhase
from dryfit.settings.rehearsal_messages import FittedReach, StepTime, StepWork

# Floating-point operations of matrix products, convolutions and attention, forward and backward.
#
# The formulas are those that ``torch.utils.flop_counter`` keeps, also for what other libraries register there; here
# stand only those that it has not, or not exactly. A multiplication and an addition are two operations.


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating-point operations of an operator: by our formula, else torch's, else none."""
    schema = schema_of(func)
    own = _FORMULAS.get(schema.name)
    if own is not None:
        return own(*args, **kwargs)
    if schema.name in _KERNELS:
        return _kernel_attention(schema.name, named_arguments(schema, args, kwargs))
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    # `addmm` and others take the type of their output as well, of which torch's formulas do not know.
    shaped = [one for one in args if not isinstance(one, torch.dtype)]
    return int(formula(*shaped, **kwargs, out_val=out))


def named_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name."""
    return {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *others: Any, **_: Any) -> int:
    """Return twice the forward's operations, once for each gradient asked for.

    torch's formula counts those of a grouped convolution's weight once for each group.
    """
    transposed, output_mask = others[4], others[7]
    places = (inputs if transposed else gradient).shape
    return 2 * places[0] * prod(places[2:]) * weight.numel() * sum(map(bool, output_mask[:2]))


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the operations of a product by groups (experts): either side may be cut into groups of rows."""
    if left.dim() == 3 and right.dim() == 2:
        return 2 * right.numel() * left.shape[-2]
    return 2 * left.numel() * right.shape[-1]


def _batch_summed(_: Any, left: Any, right: Any, **__: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _linear(inputs: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * inputs.numel() * weight.shape[0]


def _product(left: Any, right: Any) -> int:
    if right.dim() == 1:
        return 2 * left.numel()
    if left.dim() == 1:
        return 2 * right.numel()
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return 2 * prod(batch) * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * query.numel() * key.shape[-2] + 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Return the operations of five products: scores again, and the gradients of value, scores, query and key."""
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * scores * (3 * query.shape[-1] + 2 * value.shape[-1])


def _kernel_attention(name: str, named: Mapping[str, Any]) -> int:
    """Return the operations of an attention kernel's own operator; of packed rows as if all had the mean length."""
    heads, queries, keys, width = attention_sizes(name, named)
    each = (3 * width + 2 * named["value"].shape[-1]) if "backward" in name else width + named["value"].shape[-1]
    return 2 * heads * queries * keys * each


def _packed_attention(query: Any, key: Any, value: Any, *lengths: Any, **_: Any) -> int:
    return 2 * _scores(query, key, *lengths[:4]) * (query.shape[-1] + value.shape[-1])


def _packed_attention_backward(
    _: Any, query: Any, key: Any, value: Any, _out: Any, _sums: Any, *lengths: Any, **__: Any
) -> int:
    return 2 * _scores(query, key, *lengths[:4]) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Any, key: Any, begins_q: Any, begins_k: Any, *_: Any) -> int:
    """Return the number of scores where heads are the last dimension but one.

    Rows are as long as their values say; of unknown values all have the mean length, which is the least work.
    """
    heads = query.shape[-2]
    if query.dim() == 4:
        return query.shape[0] * heads * query.shape[1] * key.shape[1]
    known = [value_of(begins) for begins in (begins_q, begins_k)]
    if known[0] is None or known[1] is None:
        return heads * query.shape[0] * key.shape[0] // max(1, begins_q.numel() - 1)
    queries, keys = (one.diff() for one in known if one is not None)
    return heads * int((queries.long() * keys.long()).sum())


def _four_bit(inputs: Any, _: Any, weight_shape: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * inputs.numel() * weight_shape[0]


def _eight_bit_and_outliers(inputs: Any, _: Any, weight: Any, *__: Any, **___: Any) -> int:
    return 2 * inputs.numel() * weight.shape[0]


_ATTENTION = ("flash", "efficient", "cudnn")
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::convolution_backward": _convolution_backward,
    "aten::_int_mm": lambda left, right, **_: 2 * left.numel() * right.shape[-1],
    "aten::_addmm_activation": lambda _, left, right, **__: 2 * left.numel() * right.shape[-1],
    "aten::addbmm": _batch_summed,
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    # Whole in inference mode, where no key of autograd takes them apart.
    "aten::linear": _linear,
    "aten::matmul": _product,
    "aten::scaled_dot_product_attention": _attention,
    # Some versions of torch refuse fewer heads of keys than of queries (grouped-query attention).
    **{f"aten::_scaled_dot_product_{kernel}_attention": _attention for kernel in _ATTENTION},
    **{f"aten::_scaled_dot_product_{kernel}_attention_backward": _attention_backward for kernel in _ATTENTION},
    # Heads are the last dimension but one here, which that module does not know.
    "aten::_flash_attention_forward": _packed_attention,
    "aten::_flash_attention_backward": _packed_attention_backward,
    "aten::_cudnn_rnn": recurrent.flops,
    "aten::_cudnn_rnn_backward": lambda *args, **_: 2 * recurrent.flops(*args),
    # bitsandbytes' own operators; its other products dequantise, then call torch's.
    "bitsandbytes::gemm_4bit": _four_bit,
    "bitsandbytes::gemv_4bit": _four_bit,
    "bitsandbytes::int8_linear_matmul": _linear,
    "bitsandbytes::int8_scaled_mm": _linear,
    "bitsandbytes::int8_mixed_scaled_mm": _eight_bit_and_outliers,
}
"""Formulas that ``torch.utils.flop_counter`` has not, or not exactly."""
_KERNELS = (
    "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward",
)
"""Operators whose heads are behind the rows: torch's formulas read them the other way round."""


def timed_flops(flops: int, name: str, named: Mapping[str, Any]) -> int:
    """Return the operations that a kernel has to do: of causal attention, each query's with itself and earlier keys.

    Args:
        name: The operator's.
        named: Its arguments by name.
    """
    causal = named.get("is_causal") or named.get("custom_mask_type")
    if not flops or not causal or "key" not in named or "query" not in named:
        return flops
    _, queries, keys, _ = attention_sizes(name, named)
    seen = min(queries, keys)
    return flops * (seen * (seen + 1) // 2 + (queries - seen) * keys) // max(1, queries * keys)


# Bytes that an operator reads and writes of the device's memory.


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
        return distinct_bytes(tensor, self.device_type)


def distinct_bytes(tensor: torch.Tensor, device_type: str) -> int:
    """Return the bytes of a tensor's distinct elements, where they lie on the device."""
    if tensor.device.type != device_type or tensor.layout is torch.sparse_coo:
        return 0  # of a sparse one operators on its indices and values count
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


# Arithmetic and memory traffic of a training step, operator by operator, and the least time a device needs for them.
#
# FLOPs are those of matrix products, convolutions and attention, by the formulas that ``torch.utils.flop_counter``
# keeps (also those that other libraries register there): a multiplication and an addition are two, and recomputed
# activations count as they are computed. Bytes are what an operator reads and writes of the device's memory: a view
# is nothing, an expanded tensor is what it holds, a gather reads what it gives. Copies over the bus to or from the
# host count for what they touch on the device alone.
#
# The least time is the roofline: by operator, the longer of arithmetic and traffic at the device's published peaks
# (``settings/devices.py``), as if each kernel found its inputs in the device's memory and not in its cache. Of causal
# attention, whose FLOPs are counted whole as everywhere, only the part below the diagonal takes time.


_HALVES = {torch.float16: ProductPrecision.FP16, torch.bfloat16: ProductPrecision.BF16}


_VIEWS = {phase: Operation(Kind.VIEW, phase, 0, 0, ProductPrecision.FP32) for phase in StepPhase}
"""What moves nothing: it takes the host's time alone."""


class WorkCounter:
    """Adds up what the operators of each optimizer step cost.

    Args:
        reach: Gives what a device reaches, by its name.

    Attributes:
        is_timed: Whether formulas know all kernels.
        ranks: Size of the process group.
        is_compiled: Whether the script compiles a part of its passes that runs as it is here.
    """

    def __init__(self, device_type: str = "cuda", reach: Callable[[str], DeviceReach | None] = device_reach) -> None:
        self.is_timed = True
        self.ranks = 1
        self.is_compiled = False
        self._device_type = device_type
        self._reach = reach
        self._free: dict[Any, bool] = {}
        self._costs: dict[Any, Operation] = {}
        self._running: Counter[Operation] = Counter()
        self._last: Counter[Operation] | None = None

    def note(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        phase: StepPhase = StepPhase.FORWARD,
    ) -> None:
        """Add an operator that ran, with what it was given and what it gave, and what the script was doing."""
        free = self._free.get(func)
        if free is None:
            free = self._free[func] = moves_nothing(func)
        if free:
            self._running[_VIEWS[phase]] += 1
            return
        key = (func, phase, *map(_signed, args), _signed(out))
        if kwargs:
            key += tuple(map(_signed, kwargs.values()))
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = self._cost(func, args, kwargs, out, phase)
        if cost.counted_flops and cost.precision is ProductPrecision.FP32 and _allows_tf32(func):
            cost = self._in_tf32(cost)
        self._running[cost] += 1

    def note_kernel(self, name: str, tensors: Sequence[torch.Tensor], phase: StepPhase) -> None:
        """Add a kernel of which no more is known than the tensors that it reads or writes once."""
        key = (name, phase, *map(_signed, tensors))
        cost = self._costs.get(key)
        if cost is None:
            moved = sum(distinct_bytes(one, self._device_type) for one in tensors)
            cost = self._costs[key] = Operation(Kind.ELEMENTWISE, phase, 0, moved, ProductPrecision.FP32)
        self._running[cost] += 1

    def _in_tf32(self, cost: Operation) -> Operation:
        made = self._costs.get(cost)
        if made is None:
            made = self._costs[cost] = replace(cost, precision=ProductPrecision.TF32)
        return made

    def sends(self, kind: str, put_in_bytes: int, phase: StepPhase) -> None:
        """Add a collective.

        Args:
            kind: ``all_reduce``, ``all_gather``, ...
            put_in_bytes: The smaller of what a rank puts in and gets.
        """
        bus_bytes = put_in_bytes * (self.ranks - 1)
        if kind == "all_reduce":
            bus_bytes = 2 * bus_bytes // self.ranks
        elif kind not in ("all_gather", "reduce_scatter"):
            bus_bytes //= self.ranks
        key = ("sent", bus_bytes, phase)
        made = self._costs.get(key)
        if made is None:
            made = Operation(Kind.COLLECTIVE, phase, 0, 0, ProductPrecision.FP32, (bus_bytes,))
            self._costs[key] = made
        self._running[made] += 1

    def so_far(self) -> "Counter[Operation]":
        """Return what was noted in the current step until now."""
        return self._running.copy()

    def add(self, costs: "Counter[Operation]") -> None:
        """Count work that was not run."""
        self._running.update(costs)

    def step_ends(self, *, is_whole: bool = True) -> None:
        """Close an optimizer step: all that was noted since the last one was its work.

        Args:
            is_whole: Whether its forward pass was noted; a step without it does not take the place of one before.
        """
        if is_whole or self._last is None:
            self._last = self._running
        self._running = Counter()

    def work(self, device: DeviceSpec) -> StepWork | None:
        """Return the work of the last full step and the least time a device needs for it; None before any."""
        if self._last is None:
            return None
        rates = device_rates(device)
        flops = sum(cost.counted_flops * times for cost, times in self._last.items())
        moved_bytes = sum(cost.bytes * times for cost, times in self._last.items())
        if rates is None:
            why = f"none: no rates are published for {device.name}; name a GPU to have the least time of a step"
            return StepWork(flops_per_step=flops, bytes_per_step=moved_bytes, rates=why)
        least_s = _least_s(self._last, rates, device)
        return StepWork(
            flops_per_step=flops,
            bytes_per_step=moved_bytes,
            least_step_s=least_s,
            step_time=self._time(rates, device, least_s),
            rates=_told(rates, {cost.precision for cost in self._last if cost.counted_flops}, device.capability),
        )

    def _time(self, rates: KnownGpu, device: DeviceSpec, least_s: float) -> StepTime | None:
        reach = self._reach(known_name(device))
        if reach is None or self._last is None or not self._can_be_timed(device):
            return None
        return step_time(self._last.items(), self._timing(rates, reach, device), least_s)

    def _can_be_timed(self, device: DeviceSpec) -> bool:
        return self.is_timed and (self.ranks == 1 or device_link(known_name(device), self.ranks) is not None)

    def _timing(self, rates: KnownGpu, reach: DeviceReach, device: DeviceSpec) -> Timing:
        link = device_link(known_name(device), self.ranks) if self.ranks > 1 else None
        return Timing(rates, reach, device.capability, link, is_compiled=self.is_compiled)

    def fitted(self, device: DeviceSpec, measured_s: float, batch_share: float) -> FittedReach | None:
        """Return what the device must reach so that the last full step takes so long; None: no step has a time."""
        rates, reach, step = device_rates(device), self._reach(known_name(device)), self._last
        if rates is None or reach is None or step is None or not self._can_be_timed(device):
            return None
        least_s = _least_s(step, rates, device)
        return fitted_reach(
            step.items(),
            lambda one: self._timing(rates, one, device),
            reach,
            least_s,
            measured_s,
            batch_share,
        )

    def _cost(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, phase: StepPhase) -> Operation:
        schema = schema_of(func)
        named = named_arguments(schema, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        kind = kind_of(schema.name, flops, named, out, phase)
        matrices = (one for one in tensors_in(tuple(named.values())) if one.dim() >= 2)
        return Operation(
            kind=kind,
            phase=phase,
            flops=timed_flops(flops, schema.name, named),
            bytes=Traffic(self._device_type, schema, named, out).bytes(),
            precision=_precision(named),
            sizes=sizes_of(kind, schema.name, named, out, flops),
            element_bytes=next((one.element_size() for one in matrices), 4),
            is_backward="backward" in schema.name,
            counted_flops=flops,
        )


def _least_s(step: "Counter[Operation]", rates: KnownGpu, device: DeviceSpec) -> float:
    """Return the least time of a step at published peaks."""
    return sum(one.least_s(rates, device.capability) * times for one, times in step.items())


def _signed(value: Any) -> Any:
    """Return what a cost may depend on of an argument, as a part of a key."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return (value.shape, strides, value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(map(_signed, value))
    return value if isinstance(value, bool | int | str | torch.dtype | None) else type(value)


def _precision(named: Mapping[str, Any]) -> ProductPrecision:
    """Return what a product is computed in, by the type of its first matrix; what it is added to may have another."""
    adds = not named.keys().isdisjoint(("mat1", "batch1"))
    for tensor in tensors_in(tuple(value for name, value in named.items() if not (adds and name == "self"))):
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
