"""The environment variables of child processes."""

import os
from collections.abc import Mapping

from dryfit.core.wire import MARKER_VARIABLE

FIXED: Mapping[str, str] = {
    # One thread before the fork: thread pools of libgomp, OpenBLAS and tokenizers do not survive it. A child
    # raises its own count (pytorch/pytorch #17199).
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # pyarrow's jemalloc starts a thread at import, even where the system allocator is chosen.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # torch.cuda.is_available() must not make a CUDA context before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def child_environment(base: Mapping[str, str], marker: str, additions: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the fork server and of fresh children.

    Args:
        base: The control process's own, normally ``os.environ``.
        marker: The study's id.
        additions: Further variables; they win over all but the marker.
    """
    return {**base, **FIXED, **additions, MARKER_VARIABLE: marker}


def hide_devices(visible: str | None) -> None:
    """Let this process, which must not have touched CUDA yet, see one device; None hides all."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""


def launch_one_by_one() -> None:
    """Let this process, which must not have touched CUDA yet, wait for every kernel, so that an error names its place.

    Kernels of a build with device assertions also say which of them failed. (Errors name the macro of such a build,
    ``TORCH_USE_CUDA_DSA``; at run time it is asked for by another name: c10/cuda/CUDADeviceAssertionHost.cpp.)
    """
    os.environ.update(CUDA_LAUNCH_BLOCKING="1", PYTORCH_USE_CUDA_DSA="1")
