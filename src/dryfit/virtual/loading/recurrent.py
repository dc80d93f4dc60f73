"""Recurrent layers: without a device torch runs them step by step, and cuDNN's own buffers are not known."""

from typing import Any

import torch

LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
UNKNOWN = "buffers of cuDNN within a recurrent layer; what its steps give, one by one, is counted"
_aten = torch.ops.aten
PACKS = _aten._pack_padded_sequence.default
_WORKSPACE = 5
"""Numbers that CUDA's cell of a GRU keeps for each one of its output (``GRU_WORKSPACE_MULTIPLIER`` in RNN.cu)."""


def install() -> None:
    """Let a GRU's cell on CUDA be run on fakes: torch has fakes of an LSTM's alone."""
    torch.library.register_fake("aten::_thnn_fused_gru_cell", _cell)
    torch.library.register_fake("aten::_thnn_fused_gru_cell_backward", _backward)
    torch.backends.cudnn.is_acceptable = _no_cudnn


def _no_cudnn(_tensor: torch.Tensor) -> bool:
    """Whether cuDNN takes a tensor: layers must not ask it to lay out their weights, nor warn that it is not there."""
    return False


def _cell(
    input_gates: torch.Tensor, _hidden_gates: torch.Tensor, state: torch.Tensor, *_biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next state (rows x width) and the cell's workspace; gates are rows x 3 widths."""
    rows, width = state.shape
    return state.new_empty(rows, width), input_gates.new_empty(rows, _WORKSPACE * width)


def _backward(gradient: torch.Tensor, _workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of both gates, of the state and, where there are any, of both biases."""
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, gradient.new_empty(rows, width), *biases


def packed(args: tuple[Any, ...], lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what packs padded sequences (``nn.utils.rnn.pack_padded_sequence``) whose lengths are known.

    Args:
        args: Of the operator: a fake, two of whose dimensions are rows and lengths; lengths; which of them is first.
        lengths: A real tensor.
    """
    data = args[0]
    _, sizes = PACKS(torch.zeros(*data.shape[:2], 1), lengths, *args[2:])
    return data.new_empty(int(lengths.sum()), *data.shape[2:]), sizes
