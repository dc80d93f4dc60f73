"""What ``torch.cuda`` and ``torch.accelerator`` answer for a virtual GPU: those of the simulated device and allocator.

Patched for the life of the process. Functions that libraries look up when they are imported are there too.
"""

import os
from collections.abc import Callable
from enum import IntEnum
from functools import partial, wraps
from inspect import unwrap
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.accelerator
from torch.autograd import profiler

from dryfit.gpu.constants import processors_of
from dryfit.gpu.kernels import kernel_choices
from dryfit.gpu.private_apis.torch_modes import NEW_TENSOR
from dryfit.gpu.private_apis.torch_virtual import replace_internals, stand_in
from dryfit.gpu.script_recorder import LiveAllocations, Places
from dryfit.gpu.viewers import Failure, memory_snapshot
from dryfit.settings.devices import driver_name
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.older_python import Self

_NOT_COUNTED = ("inactive_split_bytes", "allocation", "segment", "active", "inactive_split")
_CUDA = 1
"""The kind of device, as streams number it."""
_DISTINGUISHING = {"name": "its name", "total_memory": "its memory"}
_CUDA_VERSION = "12.8"
"""What ``torch.version.cuda`` says where torch was built without CUDA."""


def _happened(*_: Any, **__: Any) -> None:
    """Do nothing: it has happened."""


def _of_the_host(begin: Callable[..., None]) -> Callable[..., None]:
    """Let a profiler record the host alone: for each operator without an event on a device it warns at length."""

    @wraps(begin)
    def begun(
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: str | None = None, **options: Any
    ) -> None:
        begin(self, enabled, use_device=None if use_cuda or use_device == "cuda" else use_device, **options)

    return begun


class CudaStream:
    """Base of streams: everything on one has happened."""

    current: ClassVar[int] = 0
    """Number of the current stream."""
    _numbers: ClassVar["count[int]"] = count(1)
    device = torch.device("cuda", 0)
    device_index = 0
    device_type = _CUDA
    priority: int
    stream_id: int
    cuda_stream: int

    def __new__(  # noqa: D102
        cls,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        stream_ptr: int | None = None,
        **_: Any,
    ) -> Self:
        made = super().__new__(cls)
        made.priority = priority
        given = stream_ptr if stream_id is None else stream_id
        made.stream_id = made.cuda_stream = next(cls._numbers) if given is None else given
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self._before: list[int] = []

    def __enter__(self) -> Self:
        self._before.append(CudaStream.current)
        CudaStream.current = self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        CudaStream.current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest priority and the highest."""
        return (0, -3)

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or CudaEvent()

    synchronize = wait_event = wait_stream = _happened


class CudaEvent:
    """Base of events: one that has happened."""

    device = torch.device("cuda", 0)
    cuda_event = event_id = 0

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102
        return super().__new__(cls)

    @classmethod
    def from_ipc_handle(cls, _device: Any, _handle: bytes) -> Self:
        """Return an event of another process."""
        return cls()

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, _end: "CudaEvent") -> float:
        """Milliseconds between two events: nobody knows; not zero, so that a rate can be computed."""
        return 1.0

    def ipc_handle(self) -> bytes:
        """Return what another process would know it by."""
        return bytes(64)

    record = wait = synchronize = _happened


class CudaGraph:
    """Base of captured graphs: what is captured runs once, at its capture, and a replay takes nothing more.

    What a capture allocates lies in a private pool, which keeps what it took; it is not given back with the graph.
    """

    allocations: ClassVar[LiveAllocations]
    _numbers = count(1)

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pool: tuple[int, ...] = (0, next(self._numbers))

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        """Allocate in the graph's pool, or in another's, which its name or a ``MemPool`` says."""
        self._pool = tuple(getattr(pool, "id", pool) or self._pool)
        self.allocations.enter_pool(self._pool)

    def capture_end(self) -> None:
        """Allocate as before."""
        self.allocations.leave_pool()

    def pool(self) -> tuple[int, ...]:
        """Return the pool's name."""
        return self._pool

    def raw_cuda_graph(self) -> int:
        """Return the driver's number of it."""
        return 0

    raw_cuda_graph_exec = raw_cuda_graph
    replay = reset = instantiate = enable_debug_mode = debug_dump = _happened


class MemoryPool:
    """Base of memory pools: what is allocated in one is allocated beside everything else."""

    _numbers = count(1)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._number = next(self._numbers)

    @property
    def id(self) -> tuple[int, int]:
        """Its name."""
        return (1, self._number)

    def use_count(self) -> int:
        """How many hold it."""
        return 1


class CudaGenerator(torch.Generator):
    """The random numbers of a device that is not there: their state is a seed and how many were drawn."""

    def get_state(self) -> torch.Tensor:
        """Return the state, of as many bytes as a device's."""
        return torch.tensor(list(self.initial_seed().to_bytes(16, "little")), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> Self:
        """Begin at a state."""
        self.manual_seed(int.from_bytes(new_state.tolist()[:8], "little"))
        return self

    def get_offset(self) -> int:
        """Return how many numbers were drawn: nobody knows."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Begin after so many numbers."""


class RuntimeStatus(IntEnum):
    """What a function of CUDA's runtime returns."""

    success = 0


class TypedTensor(type):
    """A class of tensors from before devices had names, such as ``torch.cuda.FloatTensor``."""

    dtype: torch.dtype
    default: "TypedTensor | None" = None
    """Set on this class alone: what ``torch.set_default_tensor_type`` was given; None: a type of the CPU."""

    @staticmethod
    def named(given: Any) -> "TypedTensor | None":
        """Return the class that is given, or whose name is; None: another type."""
        made = getattr(torch.cuda, given.removeprefix("torch.cuda."), None) if isinstance(given, str) else given
        return made if isinstance(made, TypedTensor) else None

    def __call__(cls, *args: Any) -> torch.Tensor:
        """Make one of given sizes, or of data as the class of the CPU does."""
        if all(isinstance(one, int) for one in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device="cuda")
        if isinstance(args[0], cls):
            return args[0].view_as(args[0])
        return getattr(torch, cls.__name__)(*args).cuda()

    def __instancecheck__(cls, instance: Any) -> bool:
        """Whether a tensor is on a device and of this type."""
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


class Properties(SimpleNamespace):
    """What the driver says of a device; whoever reads what distinguishes it from others of its kind is noted."""

    def __init__(self, on_asked: Callable[[str], None], **known: Any) -> None:
        super().__init__(**known)
        self._on_asked = on_asked

    def __getattribute__(self, name: str) -> Any:
        if name in _DISTINGUISHING:
            self._on_asked(_DISTINGUISHING[name])
        return super().__getattribute__(name)


class CudaApi:
    """Answers for one virtual device, seen as several where there are several ranks.

    Args:
        spec: The device.
        devices: How many of them the process sees.
        overhead_bytes: What its context takes.
        allocations: Of the device.
        places: Tells the lines of memory snapshots.
        on_unknown: Called with a text where something is asked for that nobody knows without a device.
        on_asked: Called with a text where the script asks for what distinguishes devices of one architecture.

    Attributes:
        shows_counters: Whether the script asked for the allocator's counters.
        is_there: Whether torch counts the device.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        devices: int,
        overhead_bytes: int,
        allocations: LiveAllocations,
        places: Places,
        on_unknown: Callable[[str], None],
        on_asked: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._devices = devices
        self._overhead_bytes = overhead_bytes
        self._allocations = allocations
        self._places = places
        self._history_since: int | None = None
        self._most_history: int | None = None
        self.failures: Callable[[], list[Failure]] = list
        self._observers: list[Callable[[int, int, int, int], Any]] = []
        self.attach_observer = self._observers.append
        self._on_asked = on_asked
        self.shows_counters = False
        self._fraction = 1.0
        self._held: dict[int, torch.Tensor] = {}
        """What was allocated as memory, by address."""
        CudaGraph.allocations = allocations
        self.begin_pool: Callable[..., None] = lambda _device, pool: allocations.enter_pool(tuple(pool))
        self.end_pool: Callable[..., None] = lambda *_: allocations.leave_pool()
        self.empty_cache = allocations.release_cached
        self.reset_peaks: Callable[..., None] = lambda *_: allocations.reset_peaks()
        self.is_there = True
        self.device_count = lambda: devices if self.is_there else 0
        self.architectures = lambda: f"sm_{spec.capability[0]}{spec.capability[1]}"
        self.current_stream = lambda _device: (CudaStream.current, 0, _CUDA)
        self.default_stream = lambda _device: (0, 0, _CUDA)
        self.external_stream = lambda pointer, _device: (pointer, 0, _CUDA)
        self.accelerator_stream = lambda _device: torch.cuda.current_stream()
        self.set_accelerator_stream = torch.cuda.set_stream
        self.accelerator_capability = lambda _device: {"supported_dtypes": _DTYPES}
        self.fraction = lambda _device: self._fraction
        self.free = self._held.pop
        self.change_allocator = lambda _allocator: on_unknown("an allocator of the script's own")

    def install(self) -> None:
        """Put the answers in their places."""
        replace_internals(self, (CudaStream, CudaEvent, CudaGraph, MemoryPool, CudaGraph))
        torch.Stream, torch.Event = CudaStream, CudaEvent  # pyright: ignore
        torch.cuda.default_generators = tuple(CudaGenerator() for _ in range(self._devices))  # pyright: ignore
        torch.cuda.is_bf16_supported = unwrap(torch.cuda.is_bf16_supported)  # it may have been replaced to plan
        # Builds for CUDA count devices by a list of them, which is empty, before they ask.
        torch.cuda.device_count = stand_in(self.device_count, torch.cuda.device_count)
        for name, answer in _OF_THE_DRIVER.items():
            setattr(torch.cuda, name, stand_in(answer, getattr(torch.cuda, name)))
        for name, answer in kernel_choices(self._spec.capability).items():
            setattr(torch.backends.cuda, name, stand_in(answer, getattr(torch.backends.cuda, name)))
        torch.cuda.memory.list_gpu_processes = torch.cuda.list_gpu_processes
        for name in _TENSORS:
            setattr(torch.cuda, name, TypedTensor(name, (), {"dtype": getattr(torch, name).dtype}))
        torch.set_default_tensor_type = stand_in(
            partial(_make_default, torch.set_default_tensor_type), torch.set_default_tensor_type
        )
        torch.Tensor.record_stream = lambda tensor, *_, **__: None  # pyright: ignore
        profiler.emit_nvtx.__enter__ = lambda self: self
        profiler.emit_nvtx.__exit__ = _happened
        profiler.profile.__init__ = _of_the_host(profiler.profile.__init__)
        if torch.version.cuda is None:
            torch.version.cuda = _CUDA_VERSION  # pyright: ignore

    def memory_stats(self, _device: int) -> dict[str, Any]:
        """The allocator's counters, by torch's names; those that are not simulated are 0."""
        self.shows_counters = True
        allocator, peaks = self._allocations.allocator, self._allocations.peaks
        allocated = _counter(self._allocations.tensor_bytes, peaks.allocated_bytes)
        stats: dict[str, Any] = {
            name: {"all": known, "large_pool": _counter(), "small_pool": _counter()}
            for name, known in (
                ("allocated_bytes", allocated),
                ("active_bytes", allocated),
                ("requested_bytes", allocated),
                ("reserved_bytes", _counter(allocator.reserved_bytes, peaks.reserved_bytes)),
                *((name, _counter()) for name in _NOT_COUNTED),
            )
        }
        return stats | {
            "oversize_allocations": _counter(),
            "oversize_segments": _counter(),
            "num_alloc_retries": allocator.retries,
            "num_ooms": len(self.failures()),
        }

    def record_history(self, enabled: Any, *how: Any, **_: Any) -> None:
        """Tell in memory snapshots what happens from now on, the last events of so many; nothing where disabled."""
        self._history_since = len(self._allocations.blocks) if enabled else None
        self._most_history = next((one for one in how if isinstance(one, int) and not isinstance(one, bool)), None)

    def memory_snapshot(self, *_: Any) -> dict[str, Any]:
        """The device's memory as it is, and what happened since this was recorded."""
        self.shows_counters = True
        kept = {"since": self._history_since, "most": self._most_history}
        return memory_snapshot(self._allocations, self._places, **kept, failures=self.failures())

    def observe_failures(self) -> None:
        """Tell the script's observers of the newest out-of-memory error, as torch does before it raises the error."""
        _, left_bytes, error = self.failures()[-1]
        for observer in self._observers:
            observer(0, error.requested_bytes, self._allocations.allocator.allocated_bytes, left_bytes)

    def properties(self, _device: int) -> "Properties":
        """What the driver says of the device."""
        major, minor = self._spec.capability
        processors = processors_of(self._spec.capability)
        return Properties(
            self._on_asked,
            name=driver_name(self._spec.name),
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

    def memory_info(self, _device: int) -> tuple[int, int]:
        """Free memory, and all."""
        self._on_asked("its free memory")
        total = self._spec.capacity_bytes
        used = self._overhead_bytes + self._allocations.allocator.reserved_bytes
        return max(0, total - used), total

    def set_fraction(self, fraction: float, _device: int) -> None:
        """Let the allocator take a part of the device."""
        self._on_asked("a part of its memory")
        self._fraction = fraction
        self._allocations.allocator.limit(int(fraction * self._spec.capacity_bytes))

    def allocate(self, size_bytes: int, _stream: int) -> int:
        """Allocate memory that is no tensor's; return its address."""
        held = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self._held[id(held)] = held
        return id(held)

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        """Let a stream be the current one."""
        CudaStream.current = stream_id

    @property
    def runtime(self) -> SimpleNamespace:
        """The functions of CUDA's runtime that torch shows."""
        done = {
            name: stand_in(lambda *_, **__: RuntimeStatus.success)
            for name in (
                *("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister"),
                *("cudaStreamCreate", "cudaStreamDestroy"),
            )
        }
        return SimpleNamespace(
            cudaError=RuntimeStatus,
            cudaGetErrorString=lambda error: error.name,
            cudaMemGetInfo=self.memory_info,
            **done,
        )

    @property
    def marks(self) -> SimpleNamespace:
        """The functions that mark ranges for a profiler."""
        names = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "deviceRangeStart", "deviceRangeEnd", "markA")
        return SimpleNamespace(**{name: stand_in(lambda *_: 0) for name in names})


def _make_default(replaced: Callable[..., None], t: Any) -> None:
    """Let tensors be of a type and on its device where nothing else is said."""
    named = TypedTensor.named(t)
    if named is None:
        replaced(t)
        if TypedTensor.default is not None:  # the context of the device stays otherwise
            torch.set_default_device("cpu")
    else:
        torch.set_default_dtype(named.dtype)
        torch.set_default_device("cuda")
        torch.Tensor.__new__ = _new_tensor  # pyright: ignore  # it asks no mode, and takes no default device
    TypedTensor.default = named


def _new_tensor(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make what ``torch.Tensor(...)`` makes: one of the default type, or of the CPU as ever."""
    if TypedTensor.default is None or cls is not torch.Tensor or kwargs:
        return NEW_TENSOR(cls, *args, **kwargs)
    return TypedTensor.default(*args)


def _counter(now: int = 0, peak: int = 0) -> dict[str, int]:
    return {"current": now, "peak": peak, "allocated": 0, "freed": 0}


_OF_THE_DRIVER: dict[str, Callable[..., Any]] = {
    **{
        name: lambda *_, **__: 0
        for name in ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate", "device_memory_used")
    },
    "list_gpu_processes": lambda *_, **__: f"GPU:0\nprocess {os.getpid():>10d}",
}
"""What torch asks another library, which asks the driver."""
_DTYPES = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_TENSORS = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "BoolTensor"),
    *("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor"),
)
"""Constructors from before devices had names."""
