"""Private names of torch about CUDA: faking a device, the allocator's settings and history."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from dryfit.settings.private_names import PrivateNames

FAKED: Final = (
    # a device guard for CUDA on a build without it; until: torch can fake a device that is absent (pytorch
    # issues 113441 and 122081 ask for parts of it)
    "torch._C._ensureCUDADeviceGuardSet",
)
UNFUSED: Final = (
    # running TorchScript without compiling kernels for a device that is absent; until: TorchScript is gone, or
    # fuses nothing on CUDA devices that are not there
    "torch._C._jit_override_can_fuse_on_gpu",
)
SET: Final = (
    # choosing the allocator's segments after torch was imported; until: torch.accelerator.memory sets them
    "torch._C._accelerator_setAllocatorSettings",
)
READ: Final = (
    # the allocator's history, as a reference; until: torch.cuda.memory has it without an underscore; its
    # documentation describes it as it is
    "torch.cuda.memory._record_memory_history",
    "torch.cuda.memory._dump_snapshot",
    # marking a history with the phases of a step; until: torch.cuda.memory has it without an underscore; its
    # documentation describes it as it is
    "torch.cuda.memory._set_memory_metadata",
    # asking nvidia-smi for the device that torch calls the first; until: torch.cuda gives a device's identity
    # without making a context
    "torch.cuda._parse_visible_devices",
    # asking the driver for a device as torch numbers them; until: torch.cuda tells a device's capability
    # without making a context
    "torch.cuda._get_nvml_device_index",
    # measuring what the first matrix product takes; until: torch.cuda can empty them; builds for the CPU do not
    # have it
    "torch._C._cuda_clearCublasWorkspaces",
)
NAMES: Final = (*FAKED, *UNFUSED, *SET, *READ)

GUARD_TABLE: Final = "_ZN3c104impl26device_guard_impl_registryE"
"""Symbol of c10's table of device guards; needed as long as :func:`set_idle_guard` is."""
CUDA, LAZY = 1, 17
"""Device types of c10 (``c10/core/DeviceType.h``)."""
CUDA_HOOKS: Final = "_ZN2at6detail12getCUDAHooksEv"
"""Symbol of the function that gives torch's CUDA hooks; needed as long as :data:`GUARD_TABLE`."""


def set_idle_guard() -> None:
    """Give CUDA a guard that does nothing, if the one that it has counts no device."""
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportAttributeAccessIssue]


def fuse_nothing() -> None:
    """Let TorchScript run operators one by one on CUDA devices: a fused kernel would be compiled for the device."""
    torch._C._jit_override_can_fuse_on_gpu(False)


def guard_table() -> Any:
    """Return c10's table of device guards, by device type: an array of pointers.

    Raises:
        OSError: This torch has no such library.
        ValueError: Its library has no such table.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * (LAZY + 1)).in_dll(c10, GUARD_TABLE)


@contextmanager
def guard_of_caller() -> Iterator[None]:
    """Put CUDA's device guard back that a ``FakeTensorMode`` replaces inside the block.

    On a build for CUDA without a visible device torch 2.11 puts an object in its place that belongs to the thread which
    entered the mode first. A thread that ends, as one that tests private names, would leave a pointer to freed memory.
    """
    try:
        table = guard_table()
    except (OSError, ValueError):  # elsewhere than on Linux, where no build is for CUDA
        yield
        return
    before = table[CUDA]
    try:
        yield
    finally:
        table[CUDA] = before


def set_allocator(settings: str) -> None:
    """Give the allocator settings in the form of ``PYTORCH_ALLOC_CONF``; they act on segments made afterwards."""
    configure: Any = torch._C._accelerator_setAllocatorSettings
    configure(settings)


def begin_history() -> None:
    """Start recording the allocator's history."""
    torch.cuda.memory._record_memory_history("all", context=None)


def end_history(file: str) -> None:
    """Write the allocator's history into a file, and stop recording."""
    torch.cuda.memory._dump_snapshot(file)
    torch.cuda.memory._record_memory_history(None)


def note_phase(phase: str) -> None:
    """Mark all further entries of the allocator's history."""
    torch.cuda.memory._set_memory_metadata(phase)


def visible_devices() -> Sequence[object]:
    """The devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; no context is made."""
    return torch.cuda._parse_visible_devices()


def nvml_index(device: Any) -> int:
    """Return the number that the driver gives a device, as ``CUDA_VISIBLE_DEVICES`` says; no context is made."""
    return torch.cuda._get_nvml_device_index(device)


def clear_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps."""
    torch._C._cuda_clearCublasWorkspaces()


# How they behave needs a device: what fakes one is tested whole by memory/fake_cuda, the rest is only looked for.
FAKE_DEVICE: Final = PrivateNames("torch", (*FAKED, *UNFUSED))
ALLOCATOR: Final = PrivateNames("torch", SET)
HISTORY: Final = PrivateNames("torch", (*SET, *READ))
