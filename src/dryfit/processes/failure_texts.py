"""Error texts and numbers of libraries, drivers and the kernel, and the conditions made of them."""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dryfit.processes.child import ChildStatus
from dryfit.processes.evidence import held_by_neighbours, known_device_memory
from dryfit.settings.devices import devices_of, visible_devices
from dryfit.settings.errors import ChildFault, Evidence
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.training_messages import StopReason
from dryfit.settings.wire import VALIDATING, Job

# Error texts and numbers of libraries, drivers and the kernel, each with its source.
#
# They are the last resort of :mod:`dryfit.processes.failures`, where no type, code or signal says it. The names and
# texts of CUDA's errors are those of ``cudaGetErrorName`` and ``cudaGetErrorString`` of its runtime 13.0.


OFFLINE = "huggingface_hub.errors.OfflineModeIsEnabled"

NETWORK_TYPES = (
    "builtins.ConnectionError",
    "builtins.TimeoutError",
    "socket.gaierror",
    "http.client.IncompleteRead",
    "urllib.error.URLError",
    "urllib3.exceptions.HTTPError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "requests.exceptions.ChunkedEncodingError",
    "httpx.TransportError",
    "httpx2.TransportError",
    "aiohttp.client_exceptions.ClientConnectionError",
)

NETWORK = (
    "We couldn't connect to '",  # transformers utils/hub.py, cached_files
    "Server Error for url",  # huggingface_hub and requests, raise_for_status of 5xx
    "429 Too Many Requests",  # the same, the hub's rate limit
)

DISK = (
    "(os error 28)",  # Rust's io::Error for ENOSPC, e.g. in safetensors' SafetensorError
    "(os error 122)",  # the same for EDQUOT
    "PytorchStreamWriter failed writing file",  # torch caffe2/serialize/inline_container.cc
)

SHARED_MEMORY = (
    "unable to allocate shared memory(shm) for file <",  # torch aten/src/ATen/MapAllocator.cpp
    "unable to write to file </torch_",  # the same file, of older torch
    "unable to open shared memory object <",  # the same file
    "Couldn't allocate shared memory segment",  # torch aten/src/ATen/MapAllocator.cpp, its manager
    "dataloader's workers are out of shared memory",  # torch torch/csrc/DataLoader.cpp, of a worker's SIGBUS
    "insufficient shared memory (shm)",  # the same file, printed by the worker itself
    "is killed by signal: Bus error",  # the same file
    "Too many open files. Communication with the workers",  # torch torch/utils/data/dataloader.py, _try_get_data
    "received 0 items of ancdata",  # CPython multiprocessing/reduction.py, recvfds, where descriptors ran out
)

SHARED_MEMORY_PLACES = ("/dev/shm/", "/torch_", "/psm_")
"""Parts of the names of files in shared memory, as torch and CPython's shared_memory call them."""

HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",  # torch c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same file
    "(os error 12)",  # Rust's io::Error for ENOMEM
    "std::bad_alloc",  # the C++ library, where native code does not catch it
)

DEVICE_MEMORY = (
    "CUDA out of memory. Tried to allocate",  # torch c10/cuda/CUDACachingAllocator.cpp, passed on as RuntimeError
    "HIP out of memory. Tried to allocate",  # the same file, of a build for ROCm
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, outside torch's allocator
    "Triton Error [CUDA]: out of memory",  # triton third_party/nvidia/backend/driver.c
    "CUBLAS_STATUS_ALLOC_FAILED",  # torch aten/src/ATen/cuda/Exceptions.cpp
)

DEVICE_LOST = (
    "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable
    "uncorrectable NVLink error detected",  # cudaErrorNvlinkUncorrectable
    "Invalid access of peer GPU memory over nvlink or a hardware error",  # cudaErrorContained
    "busy or unavailable",  # cudaErrorDevicesUnavailable, in the words of all versions of the runtime
    "no CUDA-capable device is detected",  # cudaErrorNoDevice
    "CUDA error: unknown error",  # cudaErrorUnknown: the driver has lost the device, as after a suspend
    "CUDA error: system not yet initialized",  # cudaErrorSystemNotReady: the fabric manager is not there
    "GPU has fallen off the bus",  # the NVIDIA driver, Xid 79
    "GPU is lost",  # nvml.h, NVML_ERROR_GPU_IS_LOST
)

NO_DEVICE = ("No CUDA GPUs are available",)  # torch c10/cuda/CUDAFunctions.cpp, device_count_ensure_non_zero
"""Counts only for a child that was given a device."""

DEVICE_ASSERT = (
    "device-side assert triggered",  # cudaErrorAssert
    "], thread: [",  # CUDA's assert(), as the device prints it: FILE:LINE: FUNCTION: block: [..], thread: [..]
)

NATIVE = (
    "an illegal memory access was encountered",  # cudaErrorIllegalAddress
    "an illegal instruction was encountered",  # cudaErrorIllegalInstruction
    "unspecified launch failure",  # cudaErrorLaunchFailure
    "CUDA error: misaligned address",  # cudaErrorMisalignedAddress
    "operation not supported on global/shared address space",  # cudaErrorInvalidAddressSpace
    "CUDA error: invalid program counter",  # cudaErrorInvalidPc
    "CUDA error: hardware stack error",  # cudaErrorHardwareStackError
    "the launch timed out and was terminated",  # cudaErrorLaunchTimeout
    "CUBLAS_STATUS_",  # torch aten/src/ATen/cuda/Exceptions.cpp, all but ALLOC_FAILED
    "CUDNN_STATUS_",  # torch aten/src/ATen/cudnn/Exceptions.h
)

WORKER_KILLED = ("is killed by signal: Killed",)  # torch torch/csrc/DataLoader.cpp, of a loader's worker
WORKER_CRASHED = (
    "is killed by signal: Segmentation fault",  # torch torch/csrc/DataLoader.cpp, of a loader's worker
    "is killed by signal: Aborted",  # the same file
    "exited unexpectedly",  # the same file, and torch/utils/data/dataloader.py
)

COMM_TYPES = (
    "torch.distributed.DistError",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
)

COMM = (
    "NCCL error",  # torch torch/csrc/distributed/c10d/NCCLUtils.hpp
    "Watchdog caught collective operation timeout",  # torch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    "watchdog thread terminated with exception",  # the same file
    "Some NCCL operations have failed or timed out",  # the same file
    "gloo/transport/",  # gloo, the name of the file that raised, as in its every message
)

POISONED = ("Cannot copy out of meta tensor",)  # torch torch/nn/modules/module.py, Module.to

CHECKPOINT = (
    "PytorchStreamReader failed",  # torch caffe2/serialize/inline_container.cc
    "Error while deserializing",  # safetensors bindings/python/src/lib.rs
)

FATAL_XIDS: dict[int, str] = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    64: "memory remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    156: "resource retirement",
    158: "GPU fatal timeout",
    167: "PCIe fatal timeout",
    169: "internal micro-controller halt",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}
"""Errors of the driver (Xids) after which a device is not trusted any more.

Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors): those whose immediate
action is a reset of the device or a restart of the machine, 61 and 74 of its list for older devices, 94 because the
trial's own memory was hit, and 167 to 172, which name no action yet. Left out are those that NVIDIA's device plugin for
Kubernetes calls errors of the application (13, 31, 43, 45, 68, 109; internal/rm/health.go), and those that are for
information only (63, 92, 154).
"""


# The conditions that rows of the failure table are made of.


CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})
"""Signals of a crash in native code."""

_LITTLE_BYTES = 128 << 20
"""Free bytes below which shared memory or a disk counts as full: containers have 64 MiB by default."""

_RESUMING = ("in _load_from_checkpoint", "in _load_optimizer_and_scheduler", "in _load_rng_state")
"""The Trainer's functions that read a checkpoint, as in a traceback."""

UNREADABLE_TYPES = (
    "_pickle.UnpicklingError",
    "pickle.UnpicklingError",
    "safetensors_rust.SafetensorError",
    "json.decoder.JSONDecodeError",
    "zipfile.BadZipFile",
    "builtins.EOFError",
    "builtins.OSError[EIO]",
)
"""Exceptions of reading a torn or damaged file."""


@dataclass(frozen=True, slots=True)
class FaultCase:
    """The end of an attempt."""

    evidence: Evidence
    result: ChildResult | None
    job: Job = Job.TRAIN

    @property
    def fault(self) -> ChildFault | None:
        """The fault of the evidence, or else that of the result."""
        return self.evidence.fault or (self.result.fault if self.result is not None else None)

    @property
    def stopped_by(self) -> StopReason | None:
        """Why training stopped early; None unless a training result says so."""
        trained = training_of(self.result)
        return trained.stopped_by if trained is not None else None

    @property
    def log(self) -> str:
        """The end of the log of a child that crashed in native code without a result; empty for any other child.

        Other logs are not used: what a child printed need not be why it ended.
        """
        evidence = self.evidence
        broke = evidence.signal in CRASH_SIGNALS or evidence.exit_code == ChildStatus.NO_LAST_WORD
        explained = bool(evidence.killed_by_us) or evidence.server_lost or self.fault is not None
        return evidence.log_tail if broke and not explained and self.job not in _PLANNERS else ""


_PLANNERS = (Job.PLAN, Job.REHEARSE)

Test = Callable[[FaultCase], bool]


def code(*codes: str) -> Test:
    """The child raised an error of dryfit with one of these codes."""
    return lambda case: case.fault is not None and case.fault.code in codes


def raised(*names: str) -> Test:
    """An exception of its chain is of one of these classes or a subclass."""
    return lambda case: case.fault is not None and not set(names).isdisjoint(case.fault.type_names)


def _searched(case: FaultCase) -> tuple[str, ...]:
    return (case.fault.message, case.fault.traceback) if case.fault is not None else (case.log,)


def said(*wanted: str) -> Test:
    """One of these texts is in its exception, or in its log if it left none; the last resort."""
    return lambda case: any(text in searched for searched in _searched(case) for text in wanted)


def by_signal(numbers: Iterable[int]) -> Test:
    """One of these signals ended the child."""
    wanted = frozenset(numbers)
    return lambda case: case.evidence.signal in wanted


def killed(why: str) -> Test:
    """We killed the child for this reason."""
    return lambda case: case.evidence.killed_by_us == why


def any_of(*tests: Test) -> Test:
    """At least one of the tests holds."""
    return lambda case: any(test(case) for test in tests)


def all_of(*tests: Test) -> Test:
    """All tests hold."""
    return lambda case: all(test(case) for test in tests)


def stop_asked(case: FaultCase) -> bool:
    """We had asked the child to stop."""
    return case.evidence.stop_asked


def oom_rose(case: FaultCase) -> bool:
    """The kernel killed processes for lack of memory meanwhile."""
    return case.evidence.oom_kills_rose


def has_result(case: FaultCase) -> bool:
    """The child left a result."""
    return case.result is not None and case.result.answer is not None


def has_fault(case: FaultCase) -> bool:
    """The child left an exception."""
    return case.fault is not None


def plans(case: FaultCase) -> bool:
    """The child planned a trial's memory."""
    return case.job in _PLANNERS


def calls_own_function(case: FaultCase) -> bool:
    """The child called a function of the user."""
    return case.job in (Job.OBJECTIVE, Job.TRAINER, Job.SCRIPT)


def validates(case: FaultCase) -> bool:
    """The child scored rows of a study when it ended, so many at once as its plan says."""
    return case.evidence.phase == VALIDATING and case.job is not Job.PREDICT


def left_by_itself(case: FaultCase) -> bool:
    """The child exited with a status that is not ours: its own code did that, and would do so again."""
    evidence = case.evidence
    ours = evidence.disk_full or evidence.exit_code == ChildStatus.NO_LAST_WORD
    return evidence.started and evidence.exit_code is not None and not ours


def has_device(case: FaultCase) -> bool:
    """The child was given a device."""
    return case.evidence.device is not None


def fatal_xids(case: FaultCase) -> list[int]:
    """Return the driver's errors after which a device is not trusted."""
    return [xid for xid in case.evidence.xids if xid in FATAL_XIDS]


def lost_devices(evidence: Evidence, place: str) -> tuple[str, ...]:
    """Return the devices of a place that failed when a child lost its device; all, if it is unknown which."""
    fatal = {device for xid, device in zip(evidence.xids, evidence.xid_devices, strict=False) if xid in FATAL_XIDS}
    devices = devices_of(place)
    return tuple(device for device in devices if visible_devices(device) in fatal) or devices


def lost_its_device(case: FaultCase) -> bool:
    """The driver reported a fatal error while the child ran, and no stop of ours explains its end."""
    ours = case.evidence.killed_by_us in ("now", "start") or case.evidence.server_lost
    return bool(fatal_xids(case)) and not ours


def in_shared_memory(case: FaultCase) -> bool:
    """A write to shared memory failed, or shared memory is full, while the disk has space."""
    shm, disk = case.evidence.shm_free_bytes, case.evidence.disk_free_bytes
    if disk is not None and disk < _LITTLE_BYTES:
        return False
    message = case.fault.message if case.fault is not None else case.log
    named = any(place in message for place in SHARED_MEMORY_PLACES)
    return named or (disk is not None and shm is not None and shm < _LITTLE_BYTES)


def shm_low(case: FaultCase) -> bool:
    """Shared memory is nearly full."""
    shm = case.evidence.shm_free_bytes
    return shm is not None and shm < _LITTLE_BYTES


def resumed(case: FaultCase) -> bool:
    """The child was reading a checkpoint."""
    return case.fault is not None and any(place in case.fault.traceback for place in _RESUMING)


def neighbours(case: FaultCase) -> bool:
    """Other programs held the device memory that the child needed."""
    return held_by_neighbours(known_device_memory(case.evidence, case.fault))
