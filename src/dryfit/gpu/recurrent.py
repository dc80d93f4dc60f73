"""Recurrent layers on a CUDA device: one operator of cuDNN, or torch's own cells where cuDNN is switched off.

A build of torch without CUDA runs a recurrent layer step by step. cuDNN runs all steps and layers in one operator,
``aten::_cudnn_rnn``, whose *reserve* the backward pass keeps. cuDNN's source is closed: sizes of reserve, workspace and
dropout's states are as an H200 showed (docs/measurements/gpu-histories-h200.jsonl: LSTM and GRU of two layers, fp32 and
bf16; gpu-scripts-h200-measured.jsonl); the other allocations are those of ``aten/src/ATen/native/cudnn/RNN.cpp``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import torch

from dryfit.gpu.constants import Processors
from dryfit.gpu.values import value_of

_aten = torch.ops.aten


class _Mode(IntEnum):
    """A layer's kind, as cuDNN numbers them."""

    RELU = 0
    TANH = 1
    LSTM = 2
    GRU = 3


class RunsOn(Protocol):
    """What a layer has to know of its device."""

    processors: Processors | None
    on_unknown: Callable[[str], None]
    """Called with what nobody knows of a layer's memory."""
    on_untimed: Callable[[str], None]
    """Called with why nobody knows the time of a layer."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What one layer in one direction takes, in units of its output: rows x length x width.

    Attributes:
        reserve: Numbers that the backward pass needs.
        workspace: Numbers beside them, by bytes of a number.
    """

    reserve: int
    workspace: dict[int, float]


LAYERS: Final = {
    torch.rnn_relu: _Mode.RELU,
    torch.rnn_tanh: _Mode.TANH,
    torch.lstm: _Mode.LSTM,
    torch.gru: _Mode.GRU,
}
_KEPT: Final = {
    _Mode.LSTM: _Kept(5, {2: 7.03, 4: 5.75}),  # four gates and the cell's state
    _Mode.GRU: _Kept(6, {2: 6.2, 4: 4.92}),
}
_OF_PLAIN: Final = _Kept(1, {2: 2.0, 4: 2.0})
"""Of a layer without gates, which nobody measured: its output; a step's input and state."""
UNMEASURED: Final = "buffers of cuDNN within a recurrent layer without gates, which nobody measured"
UNTIMED: Final = "steps of a recurrent layer follow each other within one operator, which nobody measured"
UNKNOWN_LENGTHS: Final = "buffers of cuDNN within a recurrent layer over rows of unknown lengths; its steps are counted"
_STATE_BYTES = 24
"""Of the random numbers of a thread of the device, which dropout between layers keeps for the life of the process."""
_RESERVE_BYTES = 256
"""Of a reserve, however small its layers are."""
_BITS = 8
_RESULTS = 5
"""How many tensors the operator gives; its backward pass four."""
_OWN_CELLS = 5
"""Numbers that CUDA's cell of a GRU keeps for each one of its output (``GRU_WORKSPACE_MULTIPLIER`` in RNN.cu)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a recurrent function, with or without packed rows."""

    data: torch.Tensor
    batch_sizes: list[int]
    states: tuple[torch.Tensor, ...]
    weights: Sequence[torch.Tensor]
    layers: int
    dropout: float
    trains: bool
    bidirectional: bool
    batch_first: bool


def run(func: Any, args: tuple[Any, ...], states: dict[torch.device, torch.Tensor], device: RunsOn) -> Any:
    """Run a function of ``LAYERS`` on fakes of the device.

    Args:
        func: The function.
        args: Its arguments, as ``torch.nn`` gives them.
        states: Of dropout, by device; the first layer with dropout makes them.
        device: What the fakes are on.
    """
    call = _call_of(args) if torch.backends.cudnn.enabled else None
    if call is not None:
        if LAYERS[func] not in _KEPT:
            device.on_unknown(UNMEASURED)
        device.on_untimed(UNTIMED)
        where = call.data.device
        if call.dropout and call.trains and where not in states and device.processors is not None:
            threads = device.processors.count * device.processors.threads
            states[where] = torch.empty(threads * _STATE_BYTES, dtype=torch.uint8, device=where)
        return _by_cudnn(LAYERS[func], call)
    if torch.backends.cudnn.enabled:
        device.on_unknown(UNKNOWN_LENGTHS)
    with torch.backends.cudnn.flags(enabled=False):  # a build for CUDA would ask its library
        return func(*args)


def _by_cudnn(mode: _Mode, call: _Call) -> tuple[torch.Tensor, ...]:
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else call.data.dtype
    data, *states = (one.to(dtype) for one in (call.data, *call.states))
    weights = [one.to(dtype) for one in call.weights]
    hidden, out_width = states[-1].shape[2], states[0].shape[2]
    # torch.nn lays weights one behind the other for the types of torch.backends.cudnn.CUDNN_TENSOR_DTYPES, and what
    # autocast makes of them too (AutocastRNN.cpp).
    flat = None if call.weights[0].dtype is torch.bfloat16 else data.new_empty(0)
    with torch.autocast("cuda", enabled=False):
        output, *left, _, _ = _aten._cudnn_rnn.default(
            data,
            weights,
            len(weights) // (call.layers * (2 if call.bidirectional else 1)),
            flat,
            states[0],
            states[1] if mode is _Mode.LSTM else None,
            mode,
            hidden,
            0 if out_width == hidden else out_width,
            call.layers,
            call.batch_first,
            call.dropout,
            call.trains,
            call.bidirectional,
            call.batch_sizes,
            None,
        )
    return (output, *left[: len(states)])


def _call_of(args: tuple[Any, ...]) -> _Call | None:
    is_packed = not isinstance(args[3], bool)
    if is_packed:
        data, sizes, states, weights, _, layers, dropout, trains, bidirectional = args
        known = value_of(sizes)
        if known is None:
            return None
        batch_sizes, batch_first = known.tolist(), False
    else:
        data, states, weights, _, layers, dropout, trains, bidirectional, batch_first = args
        batch_sizes = []
    states = (states,) if isinstance(states, torch.Tensor) else tuple(states)
    return _Call(data, batch_sizes, states, weights, layers, dropout, trains, bidirectional, batch_first)


def _forward(
    data: torch.Tensor,
    weight: Sequence[torch.Tensor],
    _stride: int,
    flat: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Return output, states, reserve, and weights one behind the other: copies where they do not lie so."""
    mode, hidden, _, layers, batch_first, dropout, train, bidirectional, batch_sizes, _ = rest
    ways = 2 if bidirectional else 1
    width = hx.shape[2] * ways
    if batch_first and not batch_sizes:
        output = data.new_empty(data.shape[1], data.shape[0], width).transpose(0, 1)
    else:
        output = data.new_empty(*data.shape[:-1], width)
    steps = data.numel() // data.shape[-1]
    of_layers = layers * hidden * _KEPT.get(_Mode(mode), _OF_PLAIN).reserve
    between = (layers - 1) * hx.shape[2]  # what a layer gives to the next one, and which of it dropout keeps
    kept_bytes = data.element_size() * (of_layers + between) + (between // _BITS if dropout else 0)
    reserve = data.new_empty(steps * ways * kept_bytes + _RESERVE_BYTES if train else 0, dtype=torch.uint8)
    cy = data.new_empty(0) if cx is None else torch.empty_like(cx)
    copied = 0 if flat is not None else sum(one.numel() for one in weight)
    return output, torch.empty_like(hx), cy, reserve, data.new_empty(copied)


def _backward(
    data: torch.Tensor,
    weight: Sequence[torch.Tensor],
    _stride: int,
    _flat: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of input, states and weights."""
    mask = rest[-1]
    grad_cx = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    weights = [torch.empty_like(one) for one in weight] if mask[3] else []
    return torch.empty_like(data), torch.empty_like(hx), grad_cx, weights


def scratch_blocks(args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """Return what ``_cudnn_rnn`` or its backward pass takes beside what it gives, and frees, in bytes.

    A backward pass works on a copy of the reserve, and the input of rows that come first is copied.
    """
    data, is_forward = args[0], len(out) == _RESULTS
    mode, hidden, _, layers, batch_first, _, _, bidirectional, batch_sizes = args[6:15] if is_forward else args[10:19]
    numbers = data.numel() // data.shape[-1] * hidden * layers * (2 if bidirectional else 1)
    taken = _KEPT.get(_Mode(mode), _OF_PLAIN).workspace
    copied = data.nbytes if batch_first and not batch_sizes else 0
    reserve = 0 if is_forward else args[20].nbytes
    workspace = round(numbers * data.element_size() * taken.get(data.element_size(), taken[4]))
    return reserve, copied, workspace


def flops(data: torch.Tensor, weight: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    """Return the operations of a layer: each row of each step is multiplied with each weight but the biases."""
    return 2 * (data.numel() // data.shape[-1]) * sum(one.numel() for one in weight if one.dim() == 2)


# torch's own cells, where a script switches cuDNN off, or the lengths of packed rows are unknown.


def install() -> None:
    """Let recurrent layers run on fakes: torch has those of an LSTM's cell, and of cuDNN without its reserve."""
    library = torch.library.Library("aten", "IMPL")
    torch.library.register_fake("aten::_thnn_fused_gru_cell", _cell)
    torch.library.register_fake("aten::_thnn_fused_gru_cell_backward", _cell_backward)
    library.impl("_cudnn_rnn", _forward, "Meta", allow_override=True)
    library.impl("_cudnn_rnn_backward", _backward, "Meta", allow_override=True)
    torch.backends.cudnn.is_acceptable = _no_cudnn
    _REGISTERED.append(library)


_REGISTERED: list[torch.library.Library] = []
"""What is registered lives as long as these."""


def _no_cudnn(_tensor: torch.Tensor) -> bool:
    """Whether cuDNN takes a tensor: layers must not ask it to lay out their weights, nor warn that it is not there."""
    return False


def _cell(
    input_gates: torch.Tensor, _hidden_gates: torch.Tensor, state: torch.Tensor, *_biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next state (rows x width) and the cell's workspace; gates are rows x 3 widths."""
    rows, width = state.shape
    return state.new_empty(rows, width), input_gates.new_empty(rows, _OWN_CELLS * width)


def _cell_backward(gradient: torch.Tensor, _workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of both gates, of the state and, where there are any, of both biases."""
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, gradient.new_empty(rows, width), *biases
