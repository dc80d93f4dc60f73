"""Error texts and numbers of libraries, drivers and the kernel, each with its source.

They are the last resort of :mod:`dryfit.runtime.failures.classify`, where no type, code or signal says it. The names
and texts of CUDA's errors are those of ``cudaGetErrorName`` and ``cudaGetErrorString`` of its runtime 13.0.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A text by which a failure is recognised.

    Attributes:
        text: The text, exactly as it is written.
        source: The library and the file that it comes from.
    """

    text: str
    source: str


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
    Text("We couldn't connect to '", "transformers utils/hub.py, cached_files"),
    Text("Server Error for url", "huggingface_hub and requests, raise_for_status of 5xx"),
    Text("429 Too Many Requests", "the same, the hub's rate limit"),
)

DISK = (
    Text("(os error 28)", "Rust's io::Error for ENOSPC, e.g. in safetensors' SafetensorError"),
    Text("(os error 122)", "the same for EDQUOT"),
    Text("PytorchStreamWriter failed writing file", "torch caffe2/serialize/inline_container.cc"),
)

SHARED_MEMORY = (
    Text("unable to allocate shared memory(shm) for file <", "torch aten/src/ATen/MapAllocator.cpp"),
    Text("unable to write to file </torch_", "the same file, of older torch"),
    Text("unable to open shared memory object <", "the same file"),
    Text("Couldn't allocate shared memory segment", "torch aten/src/ATen/MapAllocator.cpp, its manager"),
    Text("dataloader's workers are out of shared memory", "torch torch/csrc/DataLoader.cpp, of a worker's SIGBUS"),
    Text("insufficient shared memory (shm)", "the same file, printed by the worker itself"),
    Text("is killed by signal: Bus error", "the same file"),
    Text("Too many open files. Communication with the workers", "torch torch/utils/data/dataloader.py, _try_get_data"),
    Text("received 0 items of ancdata", "CPython multiprocessing/reduction.py, recvfds, where descriptors ran out"),
)

SHARED_MEMORY_PLACES = ("/dev/shm/", "/torch_", "/psm_")
"""Parts of the names of files in shared memory, as torch and CPython's shared_memory call them."""

HOST_MEMORY = (
    Text("DefaultCPUAllocator: can't allocate memory", "torch c10/core/impl/alloc_cpu.cpp"),
    Text("DefaultCPUAllocator: not enough memory", "the same file"),
    Text("(os error 12)", "Rust's io::Error for ENOMEM"),
    Text("std::bad_alloc", "the C++ library, where native code does not catch it"),
)

DEVICE_MEMORY = (
    Text("CUDA out of memory. Tried to allocate", "torch c10/cuda/CUDACachingAllocator.cpp, passed on as RuntimeError"),
    Text("HIP out of memory. Tried to allocate", "the same file, of a build for ROCm"),
    Text("CUDA error: out of memory", "cudaErrorMemoryAllocation, outside torch's allocator"),
    Text("Triton Error [CUDA]: out of memory", "triton third_party/nvidia/backend/driver.c"),
    Text("CUBLAS_STATUS_ALLOC_FAILED", "torch aten/src/ATen/cuda/Exceptions.cpp"),
)

DEVICE_LOST = (
    Text("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"),
    Text("uncorrectable NVLink error detected", "cudaErrorNvlinkUncorrectable"),
    Text("Invalid access of peer GPU memory over nvlink or a hardware error", "cudaErrorContained"),
    Text("busy or unavailable", "cudaErrorDevicesUnavailable, in the words of all versions of the runtime"),
    Text("no CUDA-capable device is detected", "cudaErrorNoDevice"),
    Text("CUDA error: unknown error", "cudaErrorUnknown: the driver has lost the device, as after a suspend"),
    Text("CUDA error: system not yet initialized", "cudaErrorSystemNotReady: the fabric manager is not there"),
    Text("GPU has fallen off the bus", "the NVIDIA driver, Xid 79"),
    Text("GPU is lost", "nvml.h, NVML_ERROR_GPU_IS_LOST"),
)

NO_DEVICE = (Text("No CUDA GPUs are available", "torch c10/cuda/CUDAFunctions.cpp, device_count_ensure_non_zero"),)
"""Counts only for a child that was given a device."""

DEVICE_ASSERT = (
    Text("device-side assert triggered", "cudaErrorAssert"),
    Text("], thread: [", "CUDA's assert(), as the device prints it: FILE:LINE: FUNCTION: block: [..], thread: [..]"),
)

NATIVE = (
    Text("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    Text("an illegal instruction was encountered", "cudaErrorIllegalInstruction"),
    Text("unspecified launch failure", "cudaErrorLaunchFailure"),
    Text("CUDA error: misaligned address", "cudaErrorMisalignedAddress"),
    Text("operation not supported on global/shared address space", "cudaErrorInvalidAddressSpace"),
    Text("CUDA error: invalid program counter", "cudaErrorInvalidPc"),
    Text("CUDA error: hardware stack error", "cudaErrorHardwareStackError"),
    Text("the launch timed out and was terminated", "cudaErrorLaunchTimeout"),
    Text("CUBLAS_STATUS_", "torch aten/src/ATen/cuda/Exceptions.cpp, all but ALLOC_FAILED"),
    Text("CUDNN_STATUS_", "torch aten/src/ATen/cudnn/Exceptions.h"),
)

WORKER_KILLED = (Text("is killed by signal: Killed", "torch torch/csrc/DataLoader.cpp, of a loader's worker"),)
WORKER_CRASHED = (
    Text("is killed by signal: Segmentation fault", "torch torch/csrc/DataLoader.cpp, of a loader's worker"),
    Text("is killed by signal: Aborted", "the same file"),
    Text("exited unexpectedly", "the same file, and torch/utils/data/dataloader.py"),
)

COMM_TYPES = (
    "torch.distributed.DistError",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
)

COMM = (
    Text("NCCL error", "torch torch/csrc/distributed/c10d/NCCLUtils.hpp"),
    Text("Watchdog caught collective operation timeout", "torch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"),
    Text("watchdog thread terminated with exception", "the same file"),
    Text("Some NCCL operations have failed or timed out", "the same file"),
    Text("gloo/transport/", "gloo, the name of the file that raised, as in its every message"),
)

POISONED = (Text("Cannot copy out of meta tensor", "torch torch/nn/modules/module.py, Module.to"),)

CHECKPOINT = (
    Text("PytorchStreamReader failed", "torch caffe2/serialize/inline_container.cc"),
    Text("Error while deserializing", "safetensors bindings/python/src/lib.rs"),
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
