"""Error texts and numbers of libraries, drivers and the kernel, each with its source.

They are the last resort of :mod:`dryfit.runtime.failures.classify`, where no type, code or signal says it. The names
and texts of CUDA's errors are those of ``cudaGetErrorName`` and ``cudaGetErrorString`` of its runtime 13.0.
"""

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
