"""Import bitsandbytes as it is installed: without kernels from a hub, and without touching a GPU.

PEFT and transformers import it unasked, also in a process that is forked later: CUDA must not be initialised there.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from dryfit.gpu.import_hooks import Surroundings, import_within

_PACKAGE = "bitsandbytes"
_FETCHER = "kernels"
_COMPLAINS = "bitsandbytes.backends.cpu.ops"


def import_offline(name: str) -> ModuleType:
    """Import a module after :func:`keep_offline`.

    Raises:
        ImportError: It is not installed, or cannot be imported.
    """
    keep_offline()
    return import_module(name)


def keep_offline(*, hides_devices: bool = False) -> None:
    """Let a kernel that bitsandbytes asks a hub for while it is imported be as if it were not there.

    It asks the package ``kernels`` for one on a CPU with bfloat16 instructions, and complains where it gets none
    (``bitsandbytes/backends/cpu/ops.py``): it keeps that to itself. transformers and PEFT import it unasked.

    Args:
        hides_devices: Whether it is to see none: it would look for CUDA's libraries.
    """
    devices = _hidden if hides_devices else _untouched
    import_within(_PACKAGE, lambda: _offline(devices))


@contextmanager
def _offline(devices: Surroundings) -> Iterator[None]:
    log = logging.getLogger(_COMPLAINS)
    level, fetcher = log.level, sys.modules.get(_FETCHER)
    log.setLevel(logging.ERROR)
    sys.modules[_FETCHER] = None  # pyright: ignore[reportArgumentType]  # so an import of it fails
    try:
        with devices():
            yield
    finally:
        log.setLevel(level)
        del sys.modules[_FETCHER]
        if fetcher is not None:
            sys.modules[_FETCHER] = fetcher


@contextmanager
def _untouched() -> Iterator[None]:
    """Let torch ask the driver for a device's capability inside the block, where it would initialise CUDA for that.

    The package chooses its library by it while it is imported (``bitsandbytes/cuda_specs.py``).
    """
    # By name: what imports this module may do without torch, until the package is imported.
    cuda = import_module("torch").cuda
    private_names: Any = import_module("dryfit.gpu.private_apis.torch_cuda")
    original = cuda.get_device_capability

    def capability(device: Any = None) -> tuple[int, int]:
        if cuda.is_initialized():
            return original(device)
        try:
            return _capability_by_driver(private_names.nvml_index(device))
        except Exception:  # noqa: BLE001  # whatever the driver's library raises: of a part of a device it knows none
            return original(device)

    cuda.get_device_capability = capability
    try:
        yield
    finally:
        cuda.get_device_capability = original


@contextmanager
def _hidden() -> Iterator[None]:
    """Let torch say inside the block that there is no device, and compile nothing: that is not the script's doing."""
    torch: Any = import_module("torch")
    is_available, compiled = torch.cuda.is_available, torch.compile
    torch.cuda.is_available, torch.compile = lambda: False, lambda function, **_: function
    try:
        yield
    finally:
        torch.cuda.is_available, torch.compile = is_available, compiled


def _capability_by_driver(index: int) -> tuple[int, int]:
    nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByIndex(index))
        return int(major), int(minor)
    finally:
        nvml.nvmlShutdown()
