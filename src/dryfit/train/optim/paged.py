"""AdamW of bitsandbytes whose state CUDA moves between host and device as it is needed, also after a resumption."""

from functools import cache
from typing import Any

import torch

from dryfit.train.optim.extras import bitsandbytes

_PAGED = ("state1", "state2")


@cache
def paged_adamw(bits: int) -> Any:
    """Return the class of the optimizer.

    Args:
        bits: Of a moment, 32 or 8.

    Raises:
        MachineError: The library is not installed.
    """
    library = bitsandbytes().optim
    parent: Any = library.PagedAdamW8bit if bits == 8 else library.PagedAdamW32bit

    class PagedAdamW(parent):
        """The library's own, but that its moments are paged again when a checkpoint is read."""

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            """Take over a state; bitsandbytes 0.50 alone would leave all of it on the device."""
            super().load_state_dict(state_dict, move_to_device=False)
            for parameter, state in self.state.items():
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    if name in _PAGED:
                        state[name] = self.get_state_buffer(parameter, dtype=value.dtype).copy_(value)
                    elif move_to_device:
                        state[name] = value.to(parameter.device)

    return PagedAdamW
