"""What ``torch.cuda`` and ``torch.accelerator`` answer for a virtual GPU: those of the simulated device and allocator.

Patched for the life of the process. Functions that libraries look up when they are imported are there too.
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from dryfit.core.settings.execution import DeviceSpec
from dryfit.memory.tracing.workspaces import processors_of
from dryfit.meta.private_apis.torch_virtual import nothing, replace_internals
from dryfit.virtual.allocations import LiveAllocations

_NOT_COUNTED = ("inactive_split_bytes", "allocation", "segment", "active", "inactive_split")
_NCCL_VERSION = (2, 28, 9)
_CUDA_VERSION = "12.8"
"""What ``torch.version.cuda`` says where torch was built without CUDA."""


class CudaStream:
    """A stream: everything on it has happened."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = 0

    def __enter__(self) -> "CudaStream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    def record_event(self, event: Any = None) -> "CudaEvent":
        """Return an event that has happened."""
        return event or CudaEvent()

    synchronize = wait_event = wait_stream = nothing


class CudaEvent:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_event = 0

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, _end: "CudaEvent") -> float:
        """Milliseconds between two events: nobody knows; not zero, so that a rate can be computed."""
        return 1.0

    record = wait = synchronize = nothing


class CudaGraph:
    """A captured graph: what is captured runs once, at its capture, and a replay takes nothing more."""

    on_unknown: ClassVar[Callable[[str], None]]
    """Called with what nobody knows of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).on_unknown("the pool of a CUDA graph, which keeps what its capture allocates apart")

    def pool(self) -> tuple[int, int]:
        """Return the pool's name."""
        return (0, 0)

    capture_begin = capture_end = replay = reset = instantiate = enable_debug_mode = debug_dump = nothing


class TypedTensor(type):
    """A class of tensors from before devices had names, such as ``torch.cuda.FloatTensor``."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        """Make one of given sizes, or of data as the class of the CPU does."""
        if all(isinstance(one, int) for one in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device="cuda")
        return getattr(torch, cls.__name__)(*args).cuda()

    def __instancecheck__(cls, instance: Any) -> bool:
        """Whether a tensor is on a device and of this type."""
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


class CudaApi:
    """Answers for one virtual device, seen as several where there are several ranks.

    Args:
        spec: The device.
        devices: How many of them the process sees.
        overhead_bytes: What its context takes.
        allocations: Of the device.
        on_unknown: Called with a text where something is asked for that nobody knows without a device.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        devices: int,
        overhead_bytes: int,
        allocations: LiveAllocations,
        on_unknown: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._devices = devices
        self._overhead_bytes = overhead_bytes
        self._allocations = allocations
        self._on_unknown = on_unknown
        self._seed = 0

    def install(self) -> None:
        """Put the answers in their places."""
        for name, answer in self._answers().items():
            setattr(torch.cuda, name, answer)
        for name in _MEMORY:
            setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
        for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all", *_SEEDS):
            setattr(torch.cuda.random, name, getattr(torch.cuda, name))
        for name, answer in self._accelerator().items():
            setattr(torch.accelerator, name, answer)
        replace_internals(self._devices, self._allocations.allocator.release_cached)
        torch.Stream = torch.cuda.Stream = torch.cuda.streams.Stream = CudaStream  # pyright: ignore
        torch.Event = torch.cuda.Event = torch.cuda.streams.Event = CudaEvent  # pyright: ignore
        CudaGraph.on_unknown = self._on_unknown
        torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = CudaGraph  # pyright: ignore
        torch.cuda.graphs.graph_pool_handle = torch.cuda.graph_pool_handle
        torch.cuda.default_generators = tuple(torch.Generator() for _ in range(self._devices))
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            setattr(torch.cuda.nvtx, name, nothing)
        for name in _TENSORS:
            setattr(torch.cuda, name, TypedTensor(name, (), {"dtype": getattr(torch, name).dtype}))
        torch.cuda.nccl.version = lambda: _NCCL_VERSION  # pyright: ignore
        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # pyright: ignore
        torch.Tensor.record_stream = lambda tensor, *_, **__: None  # pyright: ignore
        if torch.version.cuda is None:
            torch.version.cuda = _CUDA_VERSION  # pyright: ignore

    def memory_stats(self, *_: Any, **__: Any) -> "OrderedDict[str, Any]":
        """The allocator's counters, by torch's names; those that are not simulated are 0."""
        allocator, peaks = self._allocations.allocator, self._allocations.peaks
        stats: OrderedDict[str, Any] = OrderedDict()
        for name, now, peak in (
            ("allocated_bytes", allocator.allocated_bytes, peaks.allocated_bytes),
            ("active_bytes", allocator.allocated_bytes, peaks.allocated_bytes),
            ("requested_bytes", allocator.allocated_bytes, peaks.allocated_bytes),
            ("reserved_bytes", allocator.reserved_bytes, peaks.reserved_bytes),
            *((name, 0, 0) for name in _NOT_COUNTED),
        ):
            for pool in ("all", "large_pool", "small_pool"):
                known = pool == "all"
                stats[f"{name}.{pool}.current"] = now if known else 0
                stats[f"{name}.{pool}.peak"] = peak if known else 0
                stats[f"{name}.{pool}.allocated"] = stats[f"{name}.{pool}.freed"] = 0
        for name in ("oversize_allocations", "oversize_segments"):
            for part in ("current", "peak", "allocated", "freed"):
                stats[f"{name}.{part}"] = 0
        stats["num_alloc_retries"] = allocator.retries
        stats["num_ooms"] = 0
        return stats

    def _answers(self) -> dict[str, Callable[..., Any]]:
        allocator, spec = self._allocations.allocator, self._spec
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": nothing,
            "is_bf16_supported": lambda *_, **__: spec.capability >= (8, 0),
            "is_tf32_supported": lambda: spec.capability >= (8, 0),
            "device_count": lambda: self._devices,
            "current_device": lambda: 0,
            "set_device": nothing,
            "get_device_name": lambda *_: spec.name,
            "get_device_capability": lambda *_: spec.capability,
            "get_device_properties": lambda *_: self._properties(),
            "get_arch_list": lambda: [f"sm_{spec.capability[0]}{spec.capability[1]}"],
            "can_device_access_peer": lambda *_: True,
            "synchronize": nothing,
            "ipc_collect": nothing,
            "graph_pool_handle": lambda: (0, 0),
            "list_gpu_processes": lambda *_: f"GPU:0\nprocess {os.getpid():>10d}",
            "current_stream": lambda *_: CudaStream(),
            "default_stream": lambda *_: CudaStream(),
            "stream": lambda _stream: CudaStream(),
            "set_stream": nothing,
            "empty_cache": allocator.release_cached,
            "memory_allocated": lambda *_: allocator.allocated_bytes,
            "max_memory_allocated": lambda *_: self._allocations.peaks.allocated_bytes,
            "memory_reserved": lambda *_: allocator.reserved_bytes,
            "max_memory_reserved": lambda *_: self._allocations.peaks.reserved_bytes,
            "reset_peak_memory_stats": lambda *_: self._allocations.reset_peaks(),
            "reset_max_memory_allocated": lambda *_: self._allocations.reset_peaks(),
            "reset_accumulated_memory_stats": nothing,
            "memory_stats": self.memory_stats,
            "mem_get_info": self._mem_get_info,
            "set_per_process_memory_fraction": self._set_fraction,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)] * self._devices,
            "set_rng_state": nothing,
            "set_rng_state_all": nothing,
            "manual_seed": self._set_seed,
            "manual_seed_all": self._set_seed,
            "seed": nothing,
            "seed_all": nothing,
            "initial_seed": lambda: self._seed,
            "utilization": lambda *_: 0,
            "temperature": lambda *_: 0,
            "power_draw": lambda *_: 0,
            "is_current_stream_capturing": lambda: False,
        }

    def _accelerator(self) -> dict[str, Callable[..., Any]]:
        return {
            "is_available": lambda: True,
            "device_count": lambda: self._devices,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "current_device_index": lambda: 0,
            "current_device_idx": lambda: 0,
            "set_device_index": nothing,
            "set_device_idx": nothing,
            "current_stream": lambda *_: CudaStream(),
            "set_stream": nothing,
            "synchronize": nothing,
            "empty_cache": self._allocations.allocator.release_cached,
            "memory_allocated": lambda *_: self._allocations.allocator.allocated_bytes,
            "max_memory_allocated": lambda *_: self._allocations.peaks.allocated_bytes,
            "memory_reserved": lambda *_: self._allocations.allocator.reserved_bytes,
            "max_memory_reserved": lambda *_: self._allocations.peaks.reserved_bytes,
            "memory_stats": self.memory_stats,
            "reset_peak_memory_stats": lambda *_: self._allocations.reset_peaks(),
            "get_memory_info": self._mem_get_info,
        }

    def _properties(self) -> SimpleNamespace:
        major, minor = self._spec.capability
        processors = processors_of(self._spec.capability)
        return SimpleNamespace(
            name=self._spec.name,
            major=major,
            minor=minor,
            total_memory=self._spec.capacity_bytes,
            multi_processor_count=processors.count,
            is_integrated=0,
            is_multi_gpu_board=0,
            warp_size=32,
            max_threads_per_multi_processor=processors.threads,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            L2_cache_size=40 * 2**20,
            gcnArchName="",
            uuid="00000000-0000-0000-0000-000000000000",
        )

    def _mem_get_info(self, *_: Any) -> tuple[int, int]:
        total = self._spec.capacity_bytes
        used = self._overhead_bytes + self._allocations.allocator.reserved_bytes
        return max(0, total - used), total

    def _set_fraction(self, fraction: float, *_: Any) -> None:
        self._allocations.allocator.limit(int(fraction * self._spec.capacity_bytes))

    def _set_seed(self, seed: int) -> None:
        self._seed = int(seed)


_TENSORS = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "BoolTensor"),
    *("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor"),
)
"""Constructors from before devices had names."""
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed")
_MEMORY = (
    "empty_cache",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "memory_stats",
    "memory_summary",
    "mem_get_info",
    "set_per_process_memory_fraction",
)
