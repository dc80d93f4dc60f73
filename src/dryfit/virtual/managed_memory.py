"""Memory that CUDA moves between host and device as it is needed: state of bitsandbytes' paged optimizers.

Its allocator is CUDA's own (``cudaMallocManaged``), not torch's, and the driver takes it back from the device where
that is full: it counts as host memory.
"""

from collections.abc import Callable
from typing import Any

import torch

from dryfit.virtual.import_hooks import when_imported

_NOTE = "paged optimizer state counts as host memory: CUDA takes it back from the device where that is full"


def install(empty: Callable[[Any, torch.dtype], torch.Tensor], note: Callable[[str], None]) -> None:
    """Let bitsandbytes page tensors that have no memory.

    Args:
        empty: Makes a tensor of the host without values, from shape and type.
        note: Called with a remark where a tensor is paged.
    """

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        note(_NOTE)
        made: Any = empty(shape, dtype)
        made.is_paged, made.page_deviceid = True, getattr(device, "index", None) or 0
        return made

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        pass

    def change(module: Any) -> None:
        module.get_paged, module.prefetch_tensor, module.fill = get_paged, nothing, nothing

    when_imported("bitsandbytes.functional", change)
