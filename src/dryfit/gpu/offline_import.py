"""Import bitsandbytes as it is installed: without kernels from a hub, and without touching a GPU.

PEFT and transformers import it unasked, also in a process that is forked later: CUDA must not be initialised there.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Surroundings = Callable[[], AbstractContextManager[None]]
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
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder(_hidden if hides_devices else _untouched))


@contextmanager
def _offline() -> Iterator[None]:
    log = logging.getLogger(_COMPLAINS)
    level, fetcher = log.level, sys.modules.get(_FETCHER)
    log.setLevel(logging.ERROR)
    sys.modules[_FETCHER] = None  # pyright: ignore[reportArgumentType]  # so an import of it fails
    try:
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


class _Finder(MetaPathFinder):
    """Finds the package where it is, with another loader around its own.

    Args:
        surroundings: What its code runs in, besides being offline.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the package's spec, or None for any other module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _PACKAGE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._surroundings)
        return spec


class _Loader(Loader):
    """Loads the package as its own loader does, but offline."""

    def __init__(self, inner: Loader, surroundings: Surroundings) -> None:
        self._inner = inner
        self._surroundings = surroundings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module, empty."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the package's code."""
        with _offline(), self._surroundings():
            self._inner.exec_module(module)
