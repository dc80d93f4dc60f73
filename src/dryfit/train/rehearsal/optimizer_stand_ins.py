"""Stand-ins for optimizers that cannot run on tensors without data: they make the same state and learn nothing."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

# bitsandbytes 0.50: Optimizer2State.init_state.
_BLOCK_ELEMENTS = 256
_LEAST_8BIT_ELEMENTS = 4096
# bitsandbytes 0.50: Optimizer8bit.get_state_buffer.
_LEAST_PAGED_ELEMENTS = 100_000

State = dict[str, torch.Tensor]
StateOf = Callable[[nn.Parameter], State]


@final
class ModelledOptimizer(Optimizer):
    """Makes the state of another optimizer at its first step; steps take no other memory.

    Args:
        groups: Parameter groups with their ``lr``.
        state_of: Makes the state of one parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], state_of: StateOf) -> None:
        super().__init__(groups, defaults={})
        self._state_of = state_of

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here passes a closure
        """Make missing state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self._state_of(parameter)


def adamw8bit_state(parameter: nn.Parameter) -> State:
    """Return the state of bitsandbytes' AdamW8bit: two moments of a byte an element, a scale for each block of 256.

    Small tensors keep fp32 moments. The two code maps (1 KiB each, once a device) are not modelled.
    """
    if parameter.numel() < _LEAST_8BIT_ELEMENTS:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    blocks = -(-parameter.numel() // _BLOCK_ELEMENTS)
    moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    scales = {
        name: torch.zeros((blocks,), dtype=torch.float32, device=parameter.device) for name in ("absmax1", "absmax2")
    }
    return moments | scales


def paged_state(parameter: nn.Parameter, *, bits: int) -> State:
    """Return the state of bitsandbytes' paged AdamW: moments of large tensors in host memory, the rest on the device.

    Args:
        parameter: Whose state it is.
        bits: Of a moment, 32 or 8.
    """
    state = adamw8bit_state(parameter)
    if bits == 32:
        state = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    if parameter.numel() < _LEAST_PAGED_ELEMENTS:
        return state
    # What is paged is as large on the device while it is worked on, but CUDA takes it back: it counts as host memory.
    on_host = {name: torch.zeros(parameter.shape, dtype=state[name].dtype) for name in ("state1", "state2")}
    return state | on_host


def momentum_state(parameter: nn.Parameter) -> State:
    """Return the state of SGD with momentum."""
    return {"momentum_buffer": torch.empty_like(parameter)}


def no_state(parameter: nn.Parameter) -> State:
    """Return no state: it lies elsewhere."""
    return {}
