"""Launches of Triton kernels on a virtual GPU: the package's own code, without its driver.

A launch allocates nothing: the caller has allocated the outputs. So a launch binds its arguments, asks for its grid
and looks at its pointers as Triton does (``triton/runtime/jit.py``, ``backends/nvidia/driver.py``, 3.2 to 3.7), and
does nothing else but be noted: what the kernel is given has unknown values from then on. Heuristics and autotuners are
the package's own. No time is taken, so of equal times an autotuner chooses its first configuration; what it allocates
meanwhile is counted, with the buffer that its benchmark writes to.
"""

import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch

from dryfit.gpu.constants import processors_of
from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.values import forget

OnLaunch = Callable[[str, list[torch.Tensor], bool], None]
"""Called at each launch with the kernel's name, the tensors that it is given, and whether it multiplies matrices."""

_VERSIONS: Final = ("3.2", "3.3", "3.4", "3.5", "3.6", "3.7")
_BENCHMARK_INTEGERS: Final = 256 * 2**20 // 4
"""Of the buffer that ``do_bench`` clears the cache with: ``get_empty_cache_for_benchmark`` of NVIDIA's driver."""
_SHARED_BYTES: Final = {(7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376}
"""Most shared memory of a block (CUDA C++ Programming Guide, technical specifications by compute capability)."""
_LARGE_SHARED_BYTES: Final = 232448
_PRODUCTS: Final = {"dot", "dot_scaled"}
_COMPILED: Final = {"n_regs": 32, "n_spills": 0, "n_max_threads": 1024, "shared": 0, "num_warps": 4}
"""What is said of a compiled kernel: no tensor depends on it but by the number of its programs."""


def install_triton(capability: tuple[int, int], on_launch: OnLaunch, note: Callable[[str], None]) -> None:
    """Let Triton's kernels be launched without effect for the rest of this process.

    Args:
        capability: Of the device.
        on_launch: See :data:`OnLaunch`.
        note: Called with a remark where the package's version is another one.
    """

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        return _launch(kernel, args, kwargs, None if warmup else grid, on_launch)

    def change_jit(module: Any) -> None:
        version = str(getattr(sys.modules["triton"], "__version__", ""))
        if not version.startswith(_VERSIONS):
            note(f"triton {version}: launches are followed as those of {_VERSIONS[0]} to {_VERSIONS[-1]} are")
        module.JITFunction.run = launch

    def change_tuner(module: Any) -> None:  # its cache on disk asks programs of the package
        module.Autotuner.check_disk_cache = lambda _self, _key, _configs, run: bool(run())

    def change_driver(module: Any) -> None:
        module.driver.set_active(_Driver(capability))

    def change_libraries(module: Any) -> None:
        module.libcuda_dirs = list  # the driver's library, for which libraries look before they use a kernel

    def change_testing(module: Any) -> None:
        module.do_bench = module.do_bench_cudagraph = benchmark

    when_imported("triton.runtime.jit", change_jit)
    when_imported("triton.runtime.autotuner", change_tuner)
    when_imported("triton.runtime.driver", change_driver)
    when_imported("triton.backends.nvidia.driver", change_libraries)
    when_imported("triton.testing", change_testing)


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any, on_launch: OnLaunch) -> Any:
    own = {name: value for name, value in kwargs.items() if name in kernel.signature.parameters}
    bound = kernel.signature.bind(*args, **own)  # other keywords are options: num_warps, num_stages
    bound.apply_defaults()
    for hook in getattr(kernel, "pre_run_hooks", ()):
        hook(*args, **kwargs)
    compiled = SimpleNamespace(**_COMPILED, metadata=SimpleNamespace(**_COMPILED), result=lambda: compiled)
    if grid is None:
        return compiled
    if callable(grid):
        grid = grid(dict(bound.arguments))
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"a grid of {len(grid)} dimensions: Triton takes one to three")
    tensors: list[torch.Tensor] = []
    for at, value in enumerate(bound.arguments.values()):
        for tensor in _tensors_of(value):
            if not tensor.is_cuda and tensor.numel() and not tensor.is_pinned():
                raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)")
            tensors.append(tensor)
    forget(tensors)
    on_launch(kernel_name(kernel), tensors, _multiplies(kernel.fn, set()))
    return compiled


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield what a kernel may write to by an argument: a tensor, that of a descriptor or wrapper, those of a tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_of(one)
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


def kernel_name(kernel: Any) -> str:
    """Return the name of a kernel's function, behind its autotuner and heuristics."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", "")


def _multiplies(function: Any, seen: set[Any]) -> bool:
    """Whether a kernel, or one that it calls, asks for a product of matrices."""
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names = function.__code__.co_names
    called = (getattr(function.__globals__.get(name), "fn", None) for name in names)
    return not _PRODUCTS.isdisjoint(names) or any(_multiplies(one, seen) for one in called)


def benchmark(call: Callable[[], Any], *_: Any, quantiles: Any = None, return_mode: str = "", **__: Any) -> Any:
    """Take the place of Triton's benchmarks: call once, beside their buffer, and say that it took a millisecond."""
    buffer = torch.empty(_BENCHMARK_INTEGERS, dtype=torch.int32, device="cuda")
    call()
    del buffer
    if quantiles and len(quantiles) > 1:
        return [1.0] * len(quantiles)
    return [1.0] if return_mode == "all" else 1.0


class _Driver:
    """Answers what libraries ask Triton's driver."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self.utils = self
        self.binary_ext = "cubin"

    def get_current_target(self) -> Any:
        """Return the device as Triton's compiler names it."""
        major, minor = self._capability
        return sys.modules["triton.backends.compiler"].GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """Return the index of the device."""
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        """Return the default stream."""
        return 0

    def get_device_capability(self, _device: int | None = None) -> tuple[int, int]:
        """Return the compute capability."""
        return self._capability

    def set_current_device(self, _device: int) -> None:
        """Leave the device as it is: there is one."""

    def get_active_torch_device(self) -> torch.device:
        """Return the device."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return what times a kernel."""
        return benchmark

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return the buffer of a benchmark."""
        return torch.empty(_BENCHMARK_INTEGERS, dtype=torch.int32, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Write to the buffer of a benchmark."""
        cache.zero_()

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Return what ``CudaUtils`` does; clocks and bus are those of an A100."""
        return {
            "max_shared_mem": _SHARED_BYTES.get(self._capability, _LARGE_SHARED_BYTES),
            "max_num_regs": 65536,
            "multiprocessor_count": processors_of(self._capability).count,
            "warpSize": 32,
            "sm_clock_rate": 1410000,
            "mem_clock_rate": 1215000,
            "mem_bus_width": 5120,
        }
