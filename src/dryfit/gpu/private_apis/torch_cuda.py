"""Private names of torch about CUDA: faking a device, the allocator's settings and history."""

import ctypes
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, PROT_EXEC, PROT_READ, PROT_WRITE, mmap
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

HEADER_SLOTS: Final = 2
"""Before the functions of a table: the offset to the top, and the type's information (Itanium ABI)."""
TABLE_SLOTS: Final = 64
"""As many functions as are copied of a table; none has more."""
_NAMES_DEVICE: Final = (0, 1, 2)
_NAMES_STREAM: Final = (5, 6, 9)
"""Numbers of a guard's functions that name the type, the device before and the device now, and those that name a
device's stream, its default stream and the stream before (``c10/core/impl/DeviceGuardImplInterface.h``)."""
_INSTRUCTIONS: Final = {
    # movl $1, %eax; ret        movzwl %si, %eax; xorl %edx, %edx; ret
    "x86_64": (bytes.fromhex("b801000000 c3"), bytes.fromhex("0fb7c6 31d2 c3")),
    # mov w0, #1; ret           and w0, w1, #0xffff; mov x1, #0; ret
    "aarch64": (bytes.fromhex("20008052 c0035fd6"), bytes.fromhex("203c0012 010080d2 c0035fd6")),
}
"""Of two functions: one names the first CUDA device (type and index, a byte each), one the default stream of a device,
which is the device that it is given, and number 0."""
_ALIGNED: Final = 16
_WORD: Final = ctypes.sizeof(ctypes.c_void_p)
_ENSURE: Final = "_ensureCUDADeviceGuardSet"
GUARD_TABLE: Final = "_ZN3c104impl26device_guard_impl_registryE"
"""Symbol of c10's table of device guards; needed as long as :func:`set_idle_guard` is."""
CPU, CUDA, LAZY = 0, 1, 17
"""Device types of c10 (``c10/core/DeviceType.h``)."""
CUDA_HOOKS: Final = "_ZN2at6detail12getCUDAHooksEv"
"""Symbol of the function that gives torch's CUDA hooks; needed as long as :data:`GUARD_TABLE`."""


def has_idle_guard() -> bool:
    """Whether torch has a device guard that does nothing, to be put in the place of CUDA's."""
    return hasattr(torch._C, _ENSURE)


def set_idle_guard(table: Any) -> None:
    """Give CUDA a guard that does nothing, if the one that it has counts no device.

    Torch before 2.10 has no function for that. There the guard of the CPU, which does nothing either, is copied; but
    the device that it names is the CPU. So the copy has functions of our own for that, a few instructions long.

    Args:
        table: Of :func:`guard_table`.

    Raises:
        ValueError: It is written for other machines.
        OSError: This machine lets no process make instructions.
    """
    if has_idle_guard():
        torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportAttributeAccessIssue]
        return
    instructions = _INSTRUCTIONS.get(platform.machine())
    if instructions is None:
        raise ValueError(f"torch before 2.10 needs a device guard that is not written for {platform.machine()}")
    page = mmap(-1, PAGESIZE, MAP_PRIVATE | MAP_ANONYMOUS, PROT_READ | PROT_WRITE | PROT_EXEC)
    page.write(instructions[0].ljust(_ALIGNED) + instructions[1])
    code = ctypes.c_char.from_buffer(page)
    idle = (ctypes.c_void_p.from_address(table[CPU]).value or 0) - HEADER_SLOTS * _WORD
    functions = (ctypes.c_void_p * (HEADER_SLOTS + TABLE_SLOTS)).from_buffer_copy(
        ctypes.string_at(idle, (HEADER_SLOTS + TABLE_SLOTS) * _WORD)
    )
    for numbers, at in ((_NAMES_DEVICE, 0), (_NAMES_STREAM, _ALIGNED)):
        for number in numbers:
            functions[HEADER_SLOTS + number] = ctypes.addressof(code) + at
    guard = ctypes.c_void_p(ctypes.addressof(functions) + HEADER_SLOTS * _WORD)
    for kept in (code, functions, guard):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # torch may ask while Python shuts down
    table[CUDA] = ctypes.addressof(guard)


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
FAKE_DEVICE: Final = PrivateNames("torch", (*FAKED, *UNFUSED), since={FAKED[0]: (2, 10)})
ALLOCATOR: Final = PrivateNames("torch", SET)
HISTORY: Final = PrivateNames("torch", (*SET, *READ))
